"""The state of the golden checkpoints: every dtype, container and kind of value, with fixed elements."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import ckptcore

DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128", "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "int4", "uint4", "int2", "uint2",
)  # fmt: skip

Point = namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Settings:
    """A container that loads as a dict."""

    rate: float
    shape: tuple[int, ...]


def golden_state() -> dict[str, Any]:
    """Return a small state with every kind of leaf and container."""
    tied = np.arange(5, dtype=np.float32)
    return {
        "dtypes": {name: filled(name, (2, 3)) for name in DTYPES},
        "shapes": [np.float64(2.5) * np.ones(shape) for shape in ((), (0,), (3, 0, 2), (1, 2, 3, 4))],
        "times": [np.array(["2024-02-29", "NaT"], "datetime64[ns]"), np.array([90, -1], "timedelta64[s]")],
        "texts": [np.array([b"ab", b""], "S4"), np.array(["ä", "語"], "U3")],
        "scalars": [np.float32(0.1), np.int64(-3), np.bool_(True)],
        "values": {
            "none": None,
            "bools": [True, False],
            "ints": [0, -1, (1 << 53) - 1, 1 << 53, -(1 << 200)],
            "floats": [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan],
            "complex": complex(1.5, -math.inf),
            "strings": ["", "ä語😀", "\ud800", "\x00"],
            "bytes": [b"", b"\x00\xff"],
            "long": "語" * 10_000,
            "long bytes": bytes(range(256)) * 100,
        },
        "containers": {
            "ordered": OrderedDict([("b", 1), ("a", 2)]),
            "tuple": (1, (2,), ()),
            "point": Point(1, np.arange(2)),
            "settings": Settings(0.5, (1, 2)),
            "empty": {},
            "empty list": [],
        },
        "keys": {0: 1, "0": 2, -1: 3, "a.b": np.ones(1), "a": {"b": np.zeros(1)}, "": 4, "__metadata__": np.ones(2)},
        "tied": [tied, {"again": tied}],
    }


def golden_update() -> dict[str, Any]:
    """Return the part of the state that the golden update writes. The base stores the rest."""
    state = golden_state()
    return {
        "dtypes": {name: state["dtypes"][name] for name in ("int8", "bfloat16")},
        "shapes": [ckptcore.PLACEHOLDER, *state["shapes"][1:3], ckptcore.PLACEHOLDER],
        "containers": {"settings": state["containers"]["settings"]},
        "keys": {"a.b": state["keys"]["a.b"]},
    }


GOLDEN_PROCESSES = 2
"""The number of processes that saved the golden composite."""


class GoldenFiles:
    """An object that writes files, which differ between processes."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def save(self, directory: Path) -> None:
        """Write the files."""
        for key, content in golden_files(self.rank).items():
            (directory / key).parent.mkdir(parents=True, exist_ok=True)
            (directory / key).write_bytes(content)

    def load(self, directory: Path) -> None:
        """Compare the files with the expected ones."""
        for key, content in golden_files(self.rank).items():
            assert (directory / key).read_bytes() == content


def golden_files(rank: int) -> dict[str, bytes]:
    """Return the contents of the files."""
    return {"a/b/c": bytes(range(256)) * (rank + 1), "empty": b"", f"of rank {rank}": b"ckptcore"}


def golden_composite(rank: int) -> dict[str, object]:
    """Return one checkpointable of each kind, as a process of a job has them."""
    return {
        "state": golden_state(),
        "data": ckptcore.PerProcess({"rank": rank, "position": np.arange(rank, rank + 4)}),
        "files": GoldenFiles(rank),
        "a name": {},
    }


def large_state() -> dict[str, Any]:
    """Return many small arrays with long names. The tree is too large for the root, the elements for one block."""
    names = [f"a name that is long enough to make the tree large, number {number:06d}" for number in range(4000)]
    state: dict[str, Any] = {name: np.full((2, number % 3), number, np.int32) for number, name in enumerate(names)}
    state["blocks"] = np.arange(700_000, dtype=np.float32)
    return state


def filled(dtype_name: str, shape: tuple[int, ...]) -> Any:
    """Return an array with the bytes 0, 1, 2, ... Small integer dtypes and bool have only the elements 0 and 1."""
    dtype = np.dtype(getattr(ml_dtypes, dtype_name, dtype_name))
    count = math.prod(shape)
    if dtype_name in ("bool", "int2", "uint2", "int4", "uint4"):
        return (np.arange(count) % 2).astype(dtype).reshape(shape)
    return (np.arange(count * dtype.itemsize) % 127).astype(np.uint8).view(dtype).reshape(shape)
