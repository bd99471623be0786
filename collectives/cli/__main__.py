"""`python -m collectives.cli`: the `mpicomp` command where no console script is installed."""

import sys

from collectives.cli import main

sys.exit(main())
