"""States of all methods, and in the stores that people use, as they are."""

import numpy as np
import pytest
from cases import FEEDBACKS, RandomK, compressed_sum, compressors, through_a_file
from mpi4py import MPI

from collectives import GradientExchange, OuterLoop, dense_allreduce
from mpicomp import (
    AggregationAware,
    Dense,
    Hadamard,
    MomentumCorrection,
    TopK,
    WarmUp,
)


def to_npz(state, folder):
    np.savez(folder / "state.npz", **state)
    return np.load(folder / "state.npz")


def to_torch(state, folder):
    torch = pytest.importorskip("torch")
    torch.save(state, folder / "state.pt")
    return torch.load(folder / "state.pt", weights_only=False)


def to_safetensors(state, folder):
    store = pytest.importorskip("safetensors.numpy")
    store.save_file(state, folder / "state.safetensors")
    return store.load_file(folder / "state.safetensors")


def to_hdf5(state, folder):
    store = pytest.importorskip("h5py")
    with store.File(folder / "state.h5", "w") as file:
        for key, array in state.items():
            file[key] = array
    loaded = {}
    with store.File(folder / "state.h5") as file:

        def take(key, item):
            if isinstance(item, store.Dataset):
                loaded[key] = item[()]

        file.visititems(take)
    return loaded


@pytest.mark.parametrize("store", [to_npz, to_torch, to_safetensors, to_hdf5])
@pytest.mark.parametrize("kind", ["exchange", "loop"])
def test_a_state_is_stored_as_it_is(store, kind, tmp_path):
    """Names with dots, slashes and the words of the format; numbers without a dimension; a loop in flight."""
    names = [
        "layer.0/weight",
        "header",
        "header.json",
        "loop",
        "feedback/residual",
        "ä",
    ]
    shapes = dict.fromkeys(names, (30, 40)) | {"small": (7,), "none": (0,)}

    def made():
        exchange = GradientExchange(
            MPI.COMM_SELF, RandomK(0.1, seed=1), MomentumCorrection(0.5)
        )
        if kind == "exchange":
            exchange.register(arrays)
            return exchange
        return OuterLoop(exchange, arrays, every=2, momentum=0.5, delay=1)

    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    one = made()
    for step in range(2):
        if kind == "exchange":
            one(arrays)
        else:
            for array in arrays.values():
                array += step + 1
            one.step()
    state = one.state_dict()
    other = made()
    other.load_state_dict(store(state, tmp_path))
    np.testing.assert_equal(other.state_dict(), state)
    if kind == "loop":
        one.synchronise()
        other.synchronise()


METHODS = {
    **{name: {"compressor": make(0.2)} for name, make in compressors(chunk=50).items()},
    "warm-up": {"compressor": WarmUp(TopK(0.1), [0.5, 0.1], calls=2)},
    "4 bits": {"bits": 4},
    "1 bit": {"bits": 1},
    "dense": {"compressor": Dense(), "collective": dense_allreduce},
    "two-way": {
        "compressor": AggregationAware(0.2),
        "collective": compressed_sum(TopK(0.2)),
    },
}
SHAPES = {"weight": (40, 50), "bias": (7,), "scale": (3, 1)}


def gradient(step, name):
    drawn = np.random.default_rng([step, len(name)]).standard_normal(SHAPES[name])
    return drawn.astype(np.float32)


@pytest.mark.parametrize("basis", [None, Hadamard(chunk=16)])
@pytest.mark.parametrize("feedback", FEEDBACKS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_states_of_all_methods_load_bit_for_bit(dtype, feedback, basis):
    """Into a new exchange and into the one that saved, with the settings that go together; and after `hold`."""
    tried = 0
    for method in METHODS.values():

        def made(method=method):
            exchange = GradientExchange(
                MPI.COMM_SELF,
                feedback=FEEDBACKS[feedback](),
                basis=basis,
                small=10,
                **method,
            )
            exchange.register({name: given(0)[name] for name in SHAPES})
            return exchange

        def given(step):
            arrays = {name: gradient(step, name) for name in SHAPES}
            return {name: array.astype(dtype) for name, array in arrays.items()}

        def bits(means):
            return {name: mean.tobytes() for name, mean in means.items()}

        try:
            whole = made()
            whole(given(0))
        except ValueError:  # a feedback, and what does not go with it
            continue
        tried += 1
        whole(given(1))
        state = through_a_file(whole.state_dict())
        other = made()
        for exchange in whole, other:
            exchange.load_state_dict(state)
            np.testing.assert_equal(exchange.state_dict(), state)
        assert bits(whole(given(2))) == bits(other(given(2)))
        before = whole.state_dict()
        whole.hold(["weight"])
        np.testing.assert_equal(whole.state_dict(), before)
        whole.load_state_dict(before)
        np.testing.assert_equal(whole.state_dict(), before)
    assert tried > 3 or (basis is not None and feedback != "error feedback")
