"""Data that kernels are tried on, on the host and on a device."""

import numpy as np

from mpicomp.kernels import PLAN


def expected_top_k(values, k):
    magnitudes = np.abs(values)
    order = np.lexsort((np.arange(values.size), -magnitudes.astype(np.float64)))[:k]
    return np.sort(order[magnitudes[order] > 0])


def expected_in_chunks(values, k, chunk, last):
    parts = [
        np.arange(start, min(start + chunk, values.size))
        for start in range(0, values.size, chunk)
    ]
    chosen = [
        part[expected_top_k(values[part], k if part.size == chunk else last)]
        for part in parts
    ]
    return np.concatenate([np.arange(0), *chosen])


def magnitude_keys(values):
    """Return the bits of the magnitudes as unsigned integers, and how many bits."""
    width = 8 * values.itemsize - 1
    keys = np.dtype(f"u{values.itemsize}")
    return values.view(keys) & keys.type((1 << width) - 1), width


def families(dtype, n=3000):
    rng = np.random.default_rng(7)
    tiny = np.finfo(dtype).smallest_subnormal
    normal = rng.standard_normal(n)
    return {
        "normal": normal,
        "laplace": rng.laplace(size=n),
        "cauchy": np.clip(rng.standard_cauchy(n), -1e4, 1e4),
        "zeros": np.zeros(n),
        "all equal": np.full(n, -3.0),
        "sorted": np.arange(n),
        "reversed": np.arange(n)[::-1],
        "quantised": np.round(normal * 2),
        "one non-zero": np.where(np.arange(n) == 17, 1.0, 0.0),
        "neighbours": 1 + np.finfo(dtype).eps * rng.integers(0, 9, n),
        "denormal": tiny * rng.integers(-9, 10, n),
        "negative zeros": np.where(rng.random(n) < 0.9, -0.0, normal),
        "largest": np.finfo(dtype).max * rng.choice([-1, 1], n),
        "infinite": np.where(rng.random(n) < 0.1, -np.inf, normal),
        "one far off": np.where(np.arange(n) == 17, 6e4, 1 + rng.random(n) / 64),
    }


def draw_sparse(rng, size, among, index_dtype, shape=(), dtype=np.float32):
    indices = np.sort(rng.choice(among, size, replace=False)).astype(index_dtype)
    return indices, rng.standard_normal((size, *shape)).astype(dtype)


def plans_of(bounds, share, stages=4, sample=None):
    """Return the plans of segments of which a share is wanted, by samples of at most so many values."""
    plans = np.zeros(len(bounds) - 1, PLAN)
    plans["size"] = np.diff(bounds)
    plans["sample"] = (
        plans["size"] if sample is None else plans["size"].clip(max=sample)
    )
    plans["stages"] = stages
    plans["wanted"] = share * plans["size"]
    return plans
