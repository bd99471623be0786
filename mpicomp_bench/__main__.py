"""`python -m mpicomp_bench`: the `mpicomp` command where no console script is installed."""

import sys

from mpicomp_bench import main

sys.exit(main())
