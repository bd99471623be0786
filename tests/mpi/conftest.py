"""Groups of P ranks cut out of the world: a test with the fixture `comm` runs for every P.

P is 1, 2 and 5, which fit into a world of 8 ranks beside each other, and so run a test
at the same time. A test marked `every_size`, of the values that a collective returns,
runs at P = 3 and 8 as well (tests/collectives/test_simulated.py has the sizes up to 17); one marked
`small_groups`, of what is built on the collectives, at 1, 2 and 3. With MPI_TEST_ALL=1,
as in `make test-all`, all run at P = 1, 2, 3, 4, 5, 7 and 8, in a world of 16 also at
16, those of small groups up to 5. The marker `at_least(P)` leaves the smaller groups
out, `exactly(P)` all others.
"""

import os

import pytest
from devices import real_cupy
from mpi4py import MPI

from collectives.calls import checking

SIZES = (1, 2, 3, 4, 5, 7, 8, 16)
ALL = bool(os.environ.get("MPI_TEST_ALL"))
WORLD = MPI.COMM_WORLD


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.mpi)
        needs = item.get_closest_marker("stand_in")
        if needs is not None and real_cupy() is not None:
            item.add_marker(pytest.mark.skip(f"only the stand-in {needs.args[0]}"))
        unchecked = item.get_closest_marker("unchecked")
        if unchecked is not None and checking.is_enabled():
            item.add_marker(pytest.mark.skip(f"the debug mode {unchecked.args[0]}"))


def pytest_pyfunc_call(pyfuncitem):
    """Let the ranks outside of the groups sit the test out: a true value ends the call."""
    outside = pyfuncitem.funcargs.get("comm") == MPI.COMM_NULL
    return True if outside else None


def side_by_side(sizes, ranks):
    """Return the sizes in tuples, each of which so many ranks have room for, the largest first."""
    found = []
    for size in sorted(sizes, reverse=True):
        place = next((each for each in found if sum(each) + size <= ranks), None)
        if place is None:
            found.append([size])
        else:
            place.append(size)
    return [tuple(each) for each in found]


@pytest.fixture(scope="session")
def groups():
    """Return a function from sizes to the communicator of this rank's group, COMM_NULL outside of all."""
    made = {}

    def cut(sizes):
        if sizes not in made:
            of_rank = [place for place, size in enumerate(sizes) for _ in range(size)]
            mine = of_rank[WORLD.rank] if WORLD.rank < len(of_rank) else MPI.UNDEFINED
            made[sizes] = WORLD.Split(mine, WORLD.rank)
        return made[sizes]

    return cut


def sizes_of(test):
    """Return the sizes of the groups that a test runs on, by its markers."""
    if test.get_closest_marker("small_groups"):
        return SIZES[:5] if ALL else SIZES[:3]
    if ALL:
        return SIZES
    return (1, 2, 3, 5, 8) if test.get_closest_marker("every_size") else (1, 2, 5)


def pytest_generate_tests(metafunc):
    if "comm" in metafunc.fixturenames:
        least = max(
            (marker.args[0] for marker in metafunc.definition.iter_markers("at_least")),
            default=1,
        )
        exactly = [
            marker.args[0] for marker in metafunc.definition.iter_markers("exactly")
        ]
        sizes = exactly or [
            size
            for size in sizes_of(metafunc.definition)
            if least <= size <= max(8, WORLD.size)
        ]
        together = side_by_side(sizes or [least], WORLD.size)
        names = ["+".join(f"P{size}" for size in each) for each in together]
        metafunc.parametrize("comm", together, ids=names, indirect=True)


@pytest.fixture
def comm(request, groups):
    if sum(request.param) > WORLD.size:
        pytest.skip(f"needs {sum(request.param)} ranks, the world has {WORLD.size}")
    return groups(request.param)


@pytest.fixture
def fresh(comm):
    """Yield a communicator that the library has not seen, of the ranks of `comm`."""
    if comm == MPI.COMM_NULL:
        yield comm
        return
    duplicate = comm.Dup()
    yield duplicate
    duplicate.Free()
