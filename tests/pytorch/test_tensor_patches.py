"""Patches of PyTorch's weights: every bit of bfloat16, parameters in place, and tied ones."""

import pytest

from mpicomp import Patch, changes

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-torch")


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_random_bits(dtype):
    generator = torch.Generator().manual_seed(0)
    nbytes = 100_000 * dtype.itemsize
    drawn = torch.randint(256, (2, nbytes), generator=generator, dtype=torch.uint8)
    before, after = (each.view(dtype).view(100, 1000) for each in drawn)
    patch = changes(before, after)
    given = before.clone()
    Patch.from_bytes(bytes(patch)).apply(given)
    assert bits(given) == bits(after)


class Tied(torch.nn.Module):
    """A model whose head has the weights of its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight


def test_the_parameters_of_a_model_in_place():
    torch.manual_seed(0)
    model = Tied().bfloat16()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    receiver = Tied().bfloat16()
    receiver.load_state_dict(before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-3 * torch.randn_like(parameter))
    patch = changes(before, model.state_dict())
    patch.apply(receiver.state_dict())
    for name, each in model.state_dict().items():
        assert bits(receiver.state_dict()[name]) == bits(each)
    assert receiver.head.weight is receiver.embedding.weight
    with pytest.raises(ValueError, match="which the patch is for"):
        patch.apply(receiver.state_dict())
    named = dict(receiver.named_parameters())
    assert len(named) == len(before) - 1
    changes(named, named).apply(named)
