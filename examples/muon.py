"""Muon in float32, for processors that have no arithmetic in bfloat16, in which `torch.optim.Muon` computes.

    from muon import new_muon  # this file, beside your script

There a step of torch's takes longer: 4 times with AVX-512, 27 times without. Both
update alike within the rounding of bfloat16. Sources: Muon, https://kellerjordan.github.io/posts/muon; the scale
of its updates, that of AdamW's, arXiv 2502.16982. `mpicomp info` says which processor
this is.
"""

import math
import pathlib

import torch

ARITHMETIC = {"avx512_bf16", "amx_bf16", "bf16"}  # flags of x86 and of Arm


class Muon(torch.optim.Optimizer):
    """Momentum of matrices, orthogonalised, in updates as large as AdamW's."""

    def __init__(self, weights, lr, weight_decay=0.01, momentum=0.95):
        settings = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(weights, settings)

    @torch.no_grad()
    def step(self):
        """Update the matrices that have a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.update(weight, group)

    def update(self, weight, group):
        """Update a matrix."""
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight.grad)
        average = state["momentum_buffer"].lerp_(weight.grad, 1 - group["momentum"])
        ahead = weight.grad.lerp(average, group["momentum"])  # Nesterov's
        scale = 0.2 * math.sqrt(max(weight.shape))
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(orthogonalised(ahead), alpha=scale * group["lr"])


def orthogonalised(matrix):
    """Return a matrix with the same singular vectors, and singular values near 1, by five Newton-Schulz steps."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonalised(matrix.T).T
    matrix = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = matrix @ matrix.T
        quintic = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        matrix = torch.addmm(matrix, quintic, matrix, beta=3.4445)
    return matrix


def has_bfloat16(cpuinfo="/proc/cpuinfo"):
    """Return whether this processor computes in bfloat16."""
    file = pathlib.Path(cpuinfo)
    return file.exists() and not ARITHMETIC.isdisjoint(file.read_text().split())


def new_muon(weights, lr, weight_decay=0.01):
    """Return PyTorch's Muon on a GPU and where bfloat16 is fast, and else that of this file; with the same updates."""
    weights = list(weights)
    if weights[0].is_cuda or has_bfloat16():
        return torch.optim.Muon(
            weights, lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
        )
    return Muon(weights, lr, weight_decay)
