"""Groups of P ranks cut out of the world: a test with the fixture `comm` runs for every P, on the first P ranks.

P = 16 is there in a world of 16 only. The marker `at_least(P)` leaves the smaller groups out, `exactly(P)` all others.
"""

import pytest
from mpi4py import MPI

SIZES = (1, 2, 3, 4, 5, 7, 8, 16)


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.mpi)


def pytest_pyfunc_call(pyfuncitem):
    """Let the ranks outside of the group sit the test out: a true value ends the call."""
    outside = pyfuncitem.funcargs.get("comm") == MPI.COMM_NULL
    return True if outside else None


@pytest.fixture(scope="session")
def groups():
    """Return a function that gives the communicator of the first P ranks, COMM_NULL on the others."""
    made = {}

    def cut(size):
        if size not in made:
            inside = MPI.COMM_WORLD.rank < size
            made[size] = MPI.COMM_WORLD.Split(0 if inside else MPI.UNDEFINED, MPI.COMM_WORLD.rank)
        return made[size]

    return cut


def pytest_generate_tests(metafunc):
    if "comm" in metafunc.fixturenames:
        least = max((marker.args[0] for marker in metafunc.definition.iter_markers("at_least")), default=1)
        exactly = [marker.args[0] for marker in metafunc.definition.iter_markers("exactly")]
        sizes = exactly or [size for size in SIZES if least <= size <= max(8, MPI.COMM_WORLD.size)]
        metafunc.parametrize("comm", sizes, ids="P{}".format, indirect=True)


@pytest.fixture
def comm(request, groups):
    if request.param > MPI.COMM_WORLD.size:
        pytest.skip(f"needs {request.param} ranks, the world has {MPI.COMM_WORLD.size}")
    return groups(request.param)
