"""`collectives.calls.replicas` and `positions`: digests by name, when they are due, and who differs."""

import numpy as np
import pytest

from collectives.calls.positions import check_digests, check_positions
from collectives.calls.replicas import Comparison, digests_of
from collectives.faults.errors import CollectiveError


def test_nested_parameters_have_names():
    parameters = {
        "layer": [np.ones(2), {"bias": np.zeros(1)}],
        "steps": 3,
        "head": None,
    }
    digests = digests_of(parameters)
    assert [*digests] == ["layer.0", "layer.1.bias", "steps", "head"]
    assert digests["steps"] == "3"
    assert digests_of(np.ones(3)).keys() == {"array"}


def test_what_is_no_array_is_named():
    with pytest.raises(
        TypeError, match=r"model\.0 is object: expected an array, or a dict"
    ):
        digests_of({"model": [object()]})


@pytest.mark.parametrize("every", [1, 3])
def test_the_first_step_and_every_nth_are_compared(every):
    comparison = Comparison(lambda: {"w": np.ones(3)}, every, "remedy")
    compared = []
    for step in range(2, 12):
        if comparison.position("", step).digests:
            compared.append(step)
        comparison.is_due = False
    assert compared == [2, *(step for step in range(3, 12) if step % every == 0)]
    comparison.is_due = True
    assert comparison.position("", 13).digests


def test_a_step_on_which_the_ranks_did_not_agree_is_compared_again():
    comparison = Comparison(lambda: {"w": np.ones(3)}, 100, "")
    assert comparison.position("", 7).digests
    assert comparison.position("", 7).digests


def test_the_minority_and_the_first_tensor_are_named():
    usual = {"a": "1", "b": "2", "c": "3"}
    ranks = {
        0: usual,
        1: {**usual, "c": "9"},
        2: usual,
        3: {**usual, "b": "8"},
        4: usual,
    }
    with pytest.raises(
        CollectiveError,
        match=r"step: the parameters of ranks 1, 3 differ .* in 2 of 3 tensors; the first is 'b': 2 on ranks 0-2, 4; "
        r"8 on rank 3\. Do this$",
    ):
        check_digests("step: ", ranks, "Do this")


def test_ranks_without_digests_are_not_compared():
    with_digests = "step 1", {"a": "1"}
    check_positions("exchange", [with_digests, ("step 1", {}), with_digests], "")
    with pytest.raises(CollectiveError, match="out of step: step 1 on rank 0; step 2"):
        check_positions("exchange", [with_digests, ("step 2", {})], "")
