"""States in the stores that people use, as they are."""

import numpy as np
import pytest
from cases import RandomK
from mpi4py import MPI

from collectives import GradientExchange, OuterLoop
from mpicomp import MomentumCorrection


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
