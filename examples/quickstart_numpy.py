"""Save a tree of NumPy arrays and plain values, load it, and inspect it without loading it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import ckptcore


def main(directory: Path) -> None:
    location = directory / "numpy"
    weights = np.arange(12, dtype=np.float32).reshape(3, 4)
    state = {"layers": [{"weights": weights}, {"weights": np.ones(4, np.float16)}], "step": 100, "name": "quickstart"}
    ckptcore.save(location, state, metadata={"accuracy": 0.93})

    loaded = ckptcore.load(location)
    assert np.array_equal(loaded["layers"][0]["weights"], weights)
    assert (loaded["step"], loaded["name"]) == (100, "quickstart")

    metadata = ckptcore.metadata(location)
    print(f"{location}: layout {metadata.layout}, {metadata.nbytes} bytes of arrays, {dict(metadata.custom)}")

    # An abstract tree selects what to load: here only the first array. Nothing else is read.
    first = ckptcore.AbstractArray((3, 4), np.float32)
    abstract = {
        "layers": [{"weights": first}, ckptcore.PLACEHOLDER],
        "step": ckptcore.PLACEHOLDER,
        "name": ckptcore.PLACEHOLDER,
    }
    partial = ckptcore.load(location, abstract)
    assert np.array_equal(partial["layers"][0]["weights"], weights)
    assert partial["step"] is ckptcore.PLACEHOLDER

    # Existing arrays can be filled in place.
    target = metadata.abstract | {"layers": [{"weights": np.zeros((3, 4), np.float32)}, ckptcore.PLACEHOLDER]}
    before = target["layers"][0]["weights"]
    ckptcore.load_into(location, target)
    assert target["layers"][0]["weights"] is before
    assert np.array_equal(before, weights)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
