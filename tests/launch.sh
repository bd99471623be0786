#!/usr/bin/env bash
# Run pytest on several ranks in lockstep:  tests/launch.sh P [pytest arguments]
# Rank 0 writes to the terminal, and to $MPI_TEST_REPORT as XML if that is set, the others to $MPI_TEST_OUT/rank-R.log. The
# whole run ends within MPI_TEST_TIMEOUT s.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${MPI_TEST_OUT:-build/mpi-tests}
mkdir -p "$out"

# the plugins that are named only: looking for others takes each rank a second
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
export PYTHONPATH=$here/support:$here/chaos${PYTHONPATH:+:$PYTHONPATH}

if [ "${1:-}" != --rank ]; then
  size=$1; shift
  set -a; . "$here/openmpi.env"; set +a
  export MPI_TEST_NPROCS=$size
  # pytest rewrites the assertions of each file, for seconds: once, and not on each rank
  unset PYTHONDONTWRITEBYTECODE
  [ -d "$here/mpi/__pycache__" ] || timeout 120 python -m pytest -p pytest_mpi -p no:cacheprovider --collect-only -q "$here/mpi" > /dev/null || true
  exec timeout --kill-after=10 "${MPI_TEST_TIMEOUT:-900}" mpirun -n "$size" bash "$here/launch.sh" --rank "$@"
fi

shift
rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${SLURM_PROCID:-0}}}
export OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 COLUMNS=${COLUMNS:-120}
arguments=(--color=no -p lockstep -p pytest_mpi -p no:cacheprovider -p no:faulthandler --only-mpi --basetemp "$out/tmp-$rank")
if [ "$rank" = 0 ]; then
  exec python -m mpi4py -m pytest "${arguments[@]}" ${MPI_TEST_REPORT:+--junitxml="$MPI_TEST_REPORT"} "$@"
fi
exec python -m mpi4py -m pytest "${arguments[@]}" "$@" > "$out/rank-$rank.log"
