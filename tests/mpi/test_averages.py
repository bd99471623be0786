"""What a program averages beside the parameters: momenta by a loop of their own, and ranks by their tokens."""

import numpy as np
import pytest
from cases import is_last, through_a_file
from mpi4py import MPI

from collectives import (
    CollectiveError,
    GradientExchange,
    OuterLoop,
    redistribute_state,
)
from mpicomp import Dense, NoFeedback

pytestmark = pytest.mark.small_groups

SIZE = 300
EVERY = 2  # steps between rounds of the parameters, and
RARELY = 4  # of the momenta


def gradient(rank, step):
    return np.random.default_rng([rank, step]).standard_normal(SIZE)


class Rank:
    """A rank with its optimiser: parameters and momentum, each with a loop."""

    def __init__(self, comm, few_bits=False):
        def exchange():
            if few_bits:
                return GradientExchange(comm, bits=4)
            return GradientExchange(comm, Dense(), NoFeedback())

        self.comm = comm
        self.arrays = {"w": np.ones(SIZE), "m": np.zeros(SIZE)}
        weights = {"w": self.arrays["w"]}
        self.loops = [
            OuterLoop(exchange(), weights, every=EVERY),
            OuterLoop(exchange(), lambda: [self.arrays["m"]], every=RARELY),
        ]

    def train(self, steps):
        for step in steps:
            learn(self.arrays, gradient(self.comm.rank, step))
            for loop in self.loops:
                loop.step()

    def bits(self):
        states = [loop.state_dict() for loop in self.loops]
        arrays = [array for state in [self.arrays, *states] for array in state.values()]
        return [array.tobytes() for array in arrays]


def learn(arrays, given):
    """Take a step by the momentum of the gradients, in place."""
    arrays["m"] += 0.25 * (given - arrays["m"])
    arrays["w"] -= arrays["m"]


def simulated(size, steps):
    """Return the arrays of every rank after steps."""
    ranks = [{"w": np.ones(SIZE), "m": np.zeros(SIZE)} for _ in range(size)]
    for step in range(steps):
        for rank, arrays in enumerate(ranks):
            learn(arrays, gradient(rank, step))
        for name, every in ("w", EVERY), ("m", RARELY):
            if (step + 1) % every == 0:
                mean = sum(arrays[name] for arrays in ranks) / size
                for arrays in ranks:
                    arrays[name] = mean.copy()
    return ranks


@pytest.mark.parametrize("steps", [1, 2, 4, 11])
def test_momenta_in_a_loop_of_their_own_are_averaged_as_rarely_as_it_says(comm, steps):
    own = Rank(comm)
    own.train(range(steps))
    expected = simulated(comm.size, steps)[comm.rank]
    for name, array in own.arrays.items():
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("saved_at", [3, 4, 6])
def test_a_run_with_momenta_continues_bit_for_bit(comm, saved_at):
    whole = Rank(comm, few_bits=True)
    whole.train(range(saved_at))
    saved = [through_a_file(loop.state_dict()) for loop in whole.loops]
    arrays = {name: array.copy() for name, array in whole.arrays.items()}
    whole.train(range(saved_at, 9))
    again = Rank(comm, few_bits=True)
    for loop, state in zip(again.loops, saved, strict=True):
        loop.load_state_dict(state)
    for name, array in arrays.items():
        again.arrays[name][...] = array
    again.train(range(saved_at, 9))
    assert again.bits() == whole.bits()


def test_an_optimiser_may_replace_its_momenta_as_by_loading_a_state(comm):
    own = Rank(comm)
    own.train(range(5))
    own.arrays["m"] = own.arrays["m"].copy()
    own.train(range(5, 9))
    expected = simulated(comm.size, 9)[comm.rank]
    np.testing.assert_allclose(own.arrays["m"], expected["m"], rtol=0, atol=1e-12)


@pytest.mark.exactly(5)
def test_the_momenta_of_4_ranks_continue_on_2_and_on_4_again(comm):
    """Every rank has the mean, and goes on from it; what 4 bits have not sent is in the residuals."""
    states, momentum = [None, None], None
    for size, steps in (4, range(4)), (2, range(4, 8)), (4, range(8, 12)):
        group = comm.Split(0 if comm.rank < size else MPI.UNDEFINED, comm.rank)
        if group != MPI.COMM_NULL:
            own = Rank(group, few_bits=True)
            saved = len(states[0] or ())
            for loop, ranks in zip(own.loops, states, strict=True):
                if ranks:
                    loop.load_state_dict(
                        redistribute_state(ranks.__getitem__, saved, group.rank, size)
                    )
            if saved:
                np.testing.assert_array_equal(own.arrays["m"], momentum)
            own.train(steps)
            assert len({*group.allgather(own.arrays["m"].tobytes())}) == 1
            momentum = own.arrays["m"]
            gathered = [group.allgather(loop.state_dict()) for loop in own.loops]
            group.Free()
        states = comm.bcast(gathered if comm.rank == 0 else None)
        momentum = comm.bcast(momentum if comm.rank == 0 else None)
    assert momentum.any()


def test_momenta_that_are_not_finite_on_one_rank_change_nothing(comm):
    """The parameters end their round, of all ranks; the momenta end theirs when they are due again."""
    own = Rank(comm)
    own.train(range(3))
    learn(own.arrays, gradient(comm.rank, 3))
    own.loops[0].step()
    whole = own.arrays["m"].copy()
    if is_last(comm):
        own.arrays["m"][7] = np.nan
    with pytest.raises(
        ValueError if is_last(comm) else CollectiveError, match="is nan"
    ):
        own.loops[1].step()
    own.arrays["m"][...] = whole
    assert [loop.rounds for loop in own.loops] == [2, 0]
    own.train(range(4, 8))
    assert [loop.rounds for loop in own.loops] == [4, 1]
    means = {name: array.tobytes() for name, array in own.arrays.items()}
    assert len({*map(tuple, comm.allgather([*means.items()]))}) == 1


@pytest.mark.at_least(2)
@pytest.mark.parametrize("few_bits", [False, True])
def test_ranks_weigh_as_much_as_their_tokens_by_two_lines_before_a_round(
    comm, few_bits
):
    """Also a rank without any."""
    own = Rank(comm, few_bits)
    parameters, outer = {"w": own.arrays["w"]}, own.loops[0]
    expected = np.ones(SIZE)
    tolerance = 1.0 if few_bits else 1e-12
    for number in range(3):
        tokens = [(3 * rank + number) % 4 for rank in range(comm.size)]
        changes = [gradient(rank, number) for rank in range(comm.size)]
        for step in range(EVERY):
            parameters["w"] -= changes[comm.rank] / EVERY
            if step == EVERY - 1:
                share = (
                    tokens[comm.rank] * comm.size / comm.allreduce(tokens[comm.rank])
                )
                for name, start in outer.anchor.items():
                    parameters[name][...] = start + share * (parameters[name] - start)
            outer.step()
        expected -= np.average(changes, axis=0, weights=tokens)
        np.testing.assert_allclose(parameters["w"], expected, rtol=0, atol=tolerance)
    assert outer.rounds == 3
