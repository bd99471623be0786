"""Feed the reader of profiles with broken files:  python tests/fuzz_profiles.py [how many] [seed]

The text of a profile with the faults of `fuzz_codec`; and, as a hostile writer would make it, with figures replaced,
repeated and nested under a checksum that is right. Whatever comes, `parse` returns a profile whose curves are finite,
or raises ProfileError.
"""

import copy
import json
import math
import sys
from collections import Counter

import numpy as np
from fuzz_codec import limited, mutate, numbers

from collectives.profiles import MOST_POINTS, NETWORKS, ProfileError, checksum, parse

TEXT = NETWORKS["1gbit"].text()
NASTY = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 10**400, -1e-300, 1e308, 5e-324, "", "x" * 300, "a\nb", "\ud800"),
    *([], {}, [[]], [[64, 1e-6]], [[64, 2e-6], [128, 1e-6]], [[64, 0.0]], [[1, 1]] * (MOST_POINTS + 1), "[" * 50),
)


def broken(rng):
    """Return a text: bytes that were damaged, or figures that a writer made up and signed."""
    if rng.random() < 0.5:
        return mutate(np.frombuffer(TEXT.encode(), np.uint8).copy(), rng).tobytes().decode(errors="replace")
    figures = json.loads(TEXT)["profile"]
    for _ in range(rng.integers(1, 4)):
        spoil(figures, rng)
    return json.dumps({"mpicomp_profile": 1, "checksum": checksum(figures), "profile": figures})


def spoil(node, rng):
    """Replace, repeat or take away something at a random place below `node`."""
    while isinstance(node, dict | list) and node:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = keys[rng.integers(len(keys))]
        if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.7:
            node = node[key]
            continue
        kind = rng.integers(4)
        if kind == 0:
            del node[key]
        elif kind == 1 and isinstance(node, list):
            node.insert(key, copy.deepcopy(node[key]))
        elif kind == 2 and isinstance(node[key], float):
            node[key] *= 10.0 ** int(rng.integers(-20, 20))
        else:
            node[key] = copy.deepcopy(NASTY[rng.integers(len(NASTY))])
        return


def parses_or_raises(text):
    """Parse a text, and check what comes out; return what happened."""
    try:
        profile = parse(text)
    except ProfileError:
        return "refused"
    curves = [profile.inside, profile.between, profile.reduce, *profile.kernels.values()]
    for curve in curves:
        if curve is not None:
            assert len(curve.points) <= MOST_POINTS
            assert all(math.isfinite(curve(size)) and curve(size) >= 0 for size in (0.0, 64.0, 1e12)), curve
    return "parsed"


def run(count, seed):
    """Return how often a text was refused and parsed."""
    rng, counts = np.random.default_rng(seed), Counter()
    for number in range(count):
        text = broken(rng)
        try:
            counts[parses_or_raises(text)] += 1
        except BaseException:
            print(f"input {number} of seed {seed}: {text!r}", flush=True)
            raise
    return counts


if __name__ == "__main__":
    limited()
    count, seed = numbers(sys.argv[1:])
    print(f"{count} texts from seed {seed}: {dict(run(count, seed))}")
