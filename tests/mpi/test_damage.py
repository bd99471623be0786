"""Messages that arrive other than they were sent, without the debug mode: an error on every rank, by the deadline."""

from functools import partial

import numpy as np
import pytest
from cases import assert_equal, contribution, contributions, window
from disorder import Damaging, over

from collectives import (
    CollectiveError,
    configure,
    gtopk_allreduce,
    sparse_allgather,
    sparse_allreduce,
)
from collectives.runtime.messages import LINE

TIMEOUT = 0.5
VERSION_AT, ENTRIES_AT, NBYTES_AT, KIND_AT = 2, 16, 24, 48  # see `mpicomp.codec`


def _cut(buffer):
    return buffer[:-LINE] if buffer.size > LINE else buffer[:0]


def _set(at, number, buffer):
    buffer[at : at + 8] = np.array([number], np.int64).view(np.uint8)
    return buffer


def _version(buffer):
    buffer[VERSION_AT] = 9
    return buffer


def _notification(buffer):
    buffer[KIND_AT] = 2
    return buffer


DAMAGES = {
    "truncated": _cut,
    "empty": lambda buffer: buffer[:0],
    "wrong version": _version,
    "hostile number of entries": partial(_set, ENTRIES_AT, 2**62),
    "hostile size of a message": partial(_set, NBYTES_AT, 2**62),
    "said to be an error notification": _notification,
}


def damaged():
    """Return each damage with each collective, with one each in turn, the others marked slow: ranks wait for it."""
    collectives = sparse_allreduce, sparse_allgather, gtopk_allreduce
    return [
        pytest.param(
            damage,
            collective,
            marks=pytest.mark.slow if (row + column) % 3 else (),
            id=f"{collective.__name__}-{damage}",
        )
        for row, damage in enumerate(DAMAGES)
        for column, collective in enumerate(collectives)
    ]


@pytest.mark.exactly(2)
@pytest.mark.exactly(3)
@pytest.mark.parametrize(("damage", "collective"), damaged())
def test_a_damaged_message_is_an_error_on_all_that_wait_and_never_a_hang(
    comm, damage, collective
):
    vector = contribution("random", comm.rank, comm.size)
    with over(
        Damaging, comm, culprit=0, which=0, change=staticmethod(DAMAGES[damage])
    ) as own:
        configure(timeout=TIMEOUT)
        try:
            collective(vector, own)
            heard = ""  # a rank that had all it needs
        except CollectiveError as error:
            heard = str(error)
        finally:
            configure(timeout=None)
        everywhere = comm.allgather(heard)
        assert any("received a damaged message: " in each for each in everywhere)
        comm.Barrier()
        configure(timeout=TIMEOUT)
        try:
            with pytest.raises(
                CollectiveError, match="no longer uses this communicator"
            ):
                collective(vector, own)
        finally:
            configure(timeout=None)
    assert_equal(
        sparse_allreduce(vector, comm),
        sum(map(window, contributions("random", comm.size))),
    )
