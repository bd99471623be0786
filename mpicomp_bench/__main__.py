"""`python -m mpicomp_bench`: the `mpicomp` command without its console script."""

import sys

from mpicomp_bench import main

sys.exit(main())
