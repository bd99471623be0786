"""A parameter in local steps: its memory, the pseudo-gradient, and the outer step; no MPI."""

import tracemalloc

import numpy as np
import pytest

from mpicomp import SparseVector, means
from mpicomp.means import DenseMean, SparseMean
from mpicomp.replica import Replica, untied
from mpicomp.tensors import DICT, describe


def one(array, momentum=0.0):
    given = {"w": array}
    tensors = describe(given, DICT)
    return Replica(tensors, given, momentum)


def end_round(found, mean, rate=1.0, nesterov=False, delayed=False):
    kind = SparseMean if isinstance(mean, SparseVector) else DenseMean
    found.end_round(kind(mean), rate, nesterov=nesterov, delayed=delayed)


def test_one_memory_under_two_names_counts_once():
    shared, other = np.ones((3, 4)), np.ones(5)
    found = untied(
        {"a": shared, "b": other, "c": shared.reshape(12), "d": np.ones((3, 4))}
    )
    assert found == {"a": "a", "b": "b", "c": "a", "d": "d"}


def test_several_tensors_are_one_vector_in_their_order():
    given = {
        "a": np.arange(4.0).reshape(2, 2),
        "b": np.array(7.0),
        "c": np.zeros((0, 3)),
        "d": np.arange(2.0),
    }
    tensors = describe(given, DICT)
    found = Replica(tensors, given, 0.0)
    for array in given.values():
        array += 1
    found.subtract(given)
    assert found.anchor.tolist() == [0, 1, 2, 3, 7, 0, 1]
    assert found.delta.tolist() == [-1] * 7
    end_round(found, SparseVector([1, 4, 6], [-1.0, -2, -3], 7))
    assert [array.tolist() for array in given.values()] == [
        [[0, 2], [2, 3]],
        9,
        [],
        [0, 4],
    ]
    assert found.by_tensor(found.anchor)["a"].shape == (2, 2)


@pytest.mark.parametrize(
    ("arrays", "error", "match"),
    [
        (
            {"a": (whole := np.ones(8)), "b": whole[2:5]},
            ValueError,
            "two parameters share a part of their memory",
        ),
        (
            {"a": np.ones((4, 6)).T[::2]},
            ValueError,
            "a: the array is not contiguous in any order of its axes",
        ),
        (
            {"a": np.broadcast_to(np.ones(1), 4)},
            ValueError,
            "a: the array is not contiguous",
        ),
        ({"a": np.frombuffer(bytes(8))}, ValueError, "a: .* is read-only"),
        ({"a": np.ones(3, np.int32)}, TypeError, "a: values are int32"),
        ({"a": [1.0, 2.0]}, TypeError, "a: got builtins.list"),
        ({}, ValueError, "it is empty"),
    ],
)
def test_arrays_that_cannot_be_trained_are_refused(arrays, error, match):
    with pytest.raises(error, match=match):
        untied(arrays)


def test_an_array_of_another_library_is_written_in_place():
    class Foreign:
        def __init__(self):
            self.memory = np.zeros(3)

        @property
        def __array_interface__(self):
            return self.memory.__array_interface__

    given = Foreign()
    found = one(given)
    given.memory += 4
    found.subtract({"w": given})
    assert found.delta.tolist() == [-4, -4, -4]
    end_round(found, SparseVector([1], [-2.0], 3), rate=0.5)
    assert given.memory.tolist() == [0, 1, 0]


def test_a_parameter_of_pytorch_is_written_in_place():
    torch = pytest.importorskip("torch")
    given = torch.nn.Parameter(torch.zeros(3))
    found = one(given)
    with torch.no_grad():
        given += 4
    found.subtract({"w": given})
    assert found.delta.tolist() == [-4, -4, -4]
    end_round(found, SparseVector.empty(3))
    assert given.tolist() == [0, 0, 0]


def test_memory_that_was_replaced_is_taken_anew():
    class Holder:
        memory = np.zeros(3)

        @property
        def __array_interface__(self):
            return self.memory.__array_interface__

    given = Holder()
    found = one(given)
    given.memory = np.ones(3)
    found.subtract({"w": given})
    assert found.delta.tolist() == [-1, -1, -1]
    given.memory = np.ones(4)
    with pytest.raises(
        ValueError,
        match=r"w is float64 of shape \(4,\): expected float64 of shape \(3,\)",
    ):
        found.subtract({"w": given})


@pytest.mark.parametrize("delayed", [False, True])
def test_parameters_in_another_order_of_axes_have_the_same_bits(delayed):
    plain, turned = (
        np.arange(6.0).reshape(2, 3),
        np.arange(6.0).reshape(2, 3).copy(order="F"),
    )
    for array in (plain, turned):
        found = one(array)
        array += [[1, 2, 3], [4, 5, 6]]
        found.subtract({"w": array})
        if delayed:
            array *= 2
            found.find_parameters({"w": array})
        end_round(found, SparseVector([1, 5], [-3.0, -5], 6), delayed=delayed)
    assert turned.flags.f_contiguous
    assert turned.tolist() == plain.tolist()


@pytest.mark.parametrize("delayed", [False, True])
def test_torch_parameters_in_bfloat16_have_an_anchor_in_single(delayed):
    """Steps of a quarter of a bit add up there; what the parameter cannot store is no progress of a rank."""
    torch = pytest.importorskip("torch")
    given = torch.ones(2, 3, 1, 2, dtype=torch.bfloat16).to(
        memory_format=torch.channels_last
    )
    found = one(given)
    for step in range(1, 7):
        found.subtract({"w": given})
        assert not found.delta.any()
        if delayed:
            given[0, 0] -= 0.5
            found.find_parameters({"w": given})
        end_round(found, np.full(12, -(2**-9), np.float32), delayed=delayed)
        assert found.anchor.tolist() == [1 + step * 2**-9] * 12
        expected = torch.tensor(1 + step * 2**-9 + np.zeros((2, 3, 1, 2), np.float32))
        expected[0, 0] -= 0.5 * delayed
        assert torch.equal(given, expected.bfloat16())
        given[0, 0] = 1 + step * 2**-9
    assert given.is_contiguous(memory_format=torch.channels_last)


def test_momentum_of_halves_is_kept_in_single():
    found = one(np.zeros(2, np.float16), 0.9)
    end_round(found, SparseVector([0], np.ones(1, np.float16), 2))
    assert (found.velocity.dtype, found.anchor.dtype) == (np.float32, np.float16)
    assert found.anchor.tolist() == [-1, 0]


def test_an_empty_parameter():
    given = np.zeros((0, 3))
    found = one(given)
    found.subtract({"w": given})
    end_round(found, SparseVector.empty(0, np.float64))
    assert found.anchor.size == 0


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_what_follows_the_exchange_needs_little_memory_and_pieces_change_no_bit(
    momentum, monkeypatch
):
    """So a rank that is short of memory fails before the ranks agree on the round."""
    size, rng = 2**18, np.random.default_rng(0)
    start, learnt, values = (rng.standard_normal(size) for _ in range(3))
    mean, results = SparseVector(np.arange(size), values, size), []
    for piece in (means._PIECE, 1000):
        monkeypatch.setattr(means, "_PIECE", piece)
        mine = start.copy()
        found = one(mine, momentum)
        mine += learnt
        found.subtract({"w": mine})
        tracemalloc.start()
        end_round(found, mean, rate=0.7, nesterov=bool(momentum), delayed=True)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        results.append(mine.tobytes())
    assert results[0] == results[1]
    assert peak < mine.nbytes / 10
