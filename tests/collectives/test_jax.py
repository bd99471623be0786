"""Arrays and pytrees of JAX itself, on two devices of one process; and the stand-ins for them elsewhere."""

import os

import numpy as np
import pytest
from foreign import (
    Deleted,
    DynamicJaxprTracer,
    Sharded,
    SparseTensor,
    answers,
    looked_up,
)
from mpi4py import MPI

from collectives import GradientExchange
from mpicomp import Dense, SparseVector, TopK, changes
from mpicomp.arrays.frameworks import like, to_array, writable_vector

# read when JAX first looks for devices
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
jax = pytest.importorskip("jax", reason="needs JAX: make test-torch")

OUTSIDE = r"call outside of jit, grad, vmap and scan"


def exchange(**settings):
    return GradientExchange(MPI.COMM_SELF, Dense(), **settings)


def traced():
    """Return an array that JAX traces."""
    found = []
    jax.jit(lambda array: found.append(array) or array)(jax.numpy.ones(3))
    return found[0]


def deleted():
    """Return an array whose memory JAX has given to a result."""
    array = jax.numpy.ones(3)
    jax.jit(lambda it: it + 1, donate_argnums=0)(array)
    return array


def sharded():
    """Return an array on two devices."""
    mesh = jax.sharding.Mesh(jax.devices()[:2], "x")
    places = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    return jax.device_put(jax.numpy.ones(4), places)


def sparse():
    torch = pytest.importorskip("torch")
    return torch.ones(3).to_sparse()


@pytest.mark.parametrize(
    ("real", "stand_in"),
    [
        (traced, DynamicJaxprTracer),
        (deleted, Deleted),
        (sharded, Sharded),
        (sparse, SparseTensor),
    ],
)
def test_a_stand_in_for_jax_has_the_attributes_that_are_looked_up(real, stand_in):
    assert answers(stand_in()) == answers(real())
    assert {"is_deleted", "untyped_storage", "to_dense"} <= looked_up()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (traced, TypeError, OUTSIDE),
        (deleted, ValueError, "JAX has deleted, .*donated"),
        (sharded, TypeError, "pass a copy in one memory, as of jax.device_get"),
    ],
)
@pytest.mark.parametrize(
    "call",
    [
        to_array,
        writable_vector,
        TopK(k=2).compress,
        lambda it: SparseVector([0], it, 9),
    ],
)
def test_an_array_of_jax_without_values_is_refused_with_the_remedy(
    make, error, message, call
):
    with pytest.raises(error, match=message):
        call(make())


def test_an_exchange_while_jax_traces_is_refused_with_the_remedy():
    calls = exchange()

    def summed(array):
        return calls(array).sum()

    array = jax.numpy.ones(4)
    for run in (
        lambda: jax.jit(calls)(array),
        lambda: jax.grad(summed)(array),
        lambda: jax.value_and_grad(lambda it: calls({"a": it})["a"].sum())(array),
        lambda: jax.vmap(calls)(jax.numpy.ones((2, 4))),
        lambda: jax.lax.scan(lambda kept, it: (kept, calls(it)), 0, array[None]),
        lambda: jax.lax.cond(True, calls, calls, array),
        lambda: jax.checkpoint(calls)(array),
        lambda: jax.eval_shape(calls, array),
    ):
        with pytest.raises(TypeError, match=OUTSIDE):
            run()
    assert calls(array).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_mean_is_on_the_device_of_the_gradient_of_jax(dtype):
    for device in jax.devices()[:2]:
        array = jax.device_put(jax.numpy.arange(4, dtype=dtype), device)
        results = [
            exchange()(array),
            exchange()([array])[0],
            exchange(small=0)({"a": array})["a"],
            exchange(bits=4)(array),
            like(np.ones(4, np.float32), array),
        ]
        for result in results:
            assert (result.devices(), result.dtype) == ({device}, array.dtype)
            array - result  # as a step of the optimiser


def test_two_leaves_of_one_path_in_jax_are_refused_before_the_step():
    from collectives.jax import exchange_pytree

    class Pair:
        def __init__(self, *parts):
            self.parts = parts

    key = jax.tree_util.DictKey("part")
    jax.tree_util.register_pytree_with_keys(
        Pair,
        lambda pair: ([(key, part) for part in pair.parts], None),
        lambda _, parts: Pair(*parts),
    )
    calls = exchange(small=0)
    leaves = [jax.numpy.ones(2), 2 * jax.numpy.ones(2)]
    for gradients in {"a": Pair(*leaves)}, Pair(*leaves), [leaves[0], Pair(*leaves)]:
        with pytest.raises(
            ValueError, match=r"2 leaves of the gradients have the path"
        ):
            exchange_pytree(calls, gradients)
    assert calls.steps == 0
    means = exchange_pytree(calls, {"a": leaves})
    assert [leaf.tolist() for leaf in means["a"]] == [[1, 1], [2, 2]]
    assert exchange_pytree(exchange(), {"a": leaves[0], "b": None})["b"] is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_patch_of_weights_of_jax(dtype):
    before = jax.random.normal(jax.random.key(0), (300, 7)).astype(dtype)
    after = before + (before * 1e-3).astype(dtype)
    patch = changes({"weight": before}, {"weight": after})
    given = {"weight": np.array(before)}
    patch.apply(given)
    assert given["weight"].tobytes() == np.asarray(after).tobytes()
    with pytest.raises(ValueError, match="read-only"):
        patch.apply({"weight": before})
