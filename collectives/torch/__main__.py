"""`python -m collectives.torch train.py`: see `collectives.torch.launcher`."""

from collectives.torch.launcher import main

if __name__ == "__main__":
    main()
