"""`check_replicas`, and the comparison of parameters in the agreement of an exchange's step."""

import numpy as np
import pytest

from collectives import CollectiveError, GradientExchange, check_replicas, traffic
from mpicomp import TopK

pytestmark = pytest.mark.small_groups


def replicas(comm, odd=None):
    """Return nested parameters; those of one rank differ in one value of the second array."""
    parameters = {"a": np.ones(5), "b": [np.zeros((3, 4), np.float32), np.arange(3)]}
    parameters["b"][0][1, 2] = comm.rank == odd
    return parameters


def test_replicas_with_the_same_bits_pass(comm):
    check_replicas(replicas(comm), comm)
    check_replicas([np.ones(3), 1, None, "text"], comm)


@pytest.mark.at_least(2)
def test_other_bits_on_one_rank_raise_on_all(comm):
    odd = comm.size - 1
    with pytest.raises(
        CollectiveError,
        match=rf"the parameters of rank {odd} differ .* in 1 of 3 tensors; the first is 'b.0': float32 of shape",
    ):
        check_replicas(replicas(comm, odd), comm)


@pytest.mark.at_least(2)
def test_what_is_no_array_raises_on_all(comm):
    parameters = object() if comm.rank == 0 else np.ones(3)
    with pytest.raises(
        (TypeError, CollectiveError), match="parameters is object: expected"
    ):
        check_replicas(parameters, comm)


@pytest.mark.at_least(2)
@pytest.mark.parametrize("every", [2, 100])
def test_an_exchange_compares_at_the_first_step_and_every_nth(comm, every):
    parameters = np.zeros(4)
    exchange = GradientExchange(comm, TopK(k=2))
    exchange.compare_replicas(lambda: parameters, every)
    gradient = np.arange(4.0)
    exchange(gradient)
    exchange(gradient)
    parameters[1] = comm.rank
    residual = exchange.state_dict()
    if every == 100:
        exchange(gradient)
        exchange.load_state_dict(exchange.state_dict())
        residual = exchange.state_dict()
    for _ in range(2):
        with pytest.raises(CollectiveError, match=r"parameters of ranks? .* differ"):
            exchange(gradient)
    np.testing.assert_equal(exchange.state_dict(), residual)
    parameters[1] = 0
    exchange(gradient)


@pytest.mark.at_least(2)
def test_the_comparison_sends_no_message(comm):
    def sent(every):
        exchange = GradientExchange(comm, TopK(k=2))
        exchange.compare_replicas(lambda: np.ones(1000), every)
        exchange(np.arange(4.0))
        before = traffic(comm)
        for _ in range(3):
            exchange(np.arange(4.0))
        after = traffic(comm)
        return after.messages - before.messages, after.nbytes - before.nbytes

    assert sent(1) == sent(100)


@pytest.mark.at_least(2)
def test_a_rank_whose_parameters_are_not_to_be_compared_takes_part_in_steps(comm):
    exchange = GradientExchange(comm, TopK(k=2))
    exchange.compare_replicas(lambda: {} if comm.rank == 0 else {"a": np.ones(3)}, 1)
    for _ in range(3):
        exchange(np.arange(4.0))
    assert exchange.steps == 3


@pytest.mark.at_least(2)
def test_an_error_of_the_function_raises_on_all_and_changes_nothing(comm):
    broken = [comm.rank == comm.size - 1]

    def parameters():
        if broken[0]:
            raise RuntimeError("no parameters")
        return np.ones(3)

    exchange = GradientExchange(comm, TopK(k=2))
    exchange.compare_replicas(parameters)
    with pytest.raises((RuntimeError, CollectiveError), match="no parameters"):
        exchange(np.arange(4.0))
    broken[0] = False
    exchange(np.arange(4.0))
    assert exchange.steps == 1
