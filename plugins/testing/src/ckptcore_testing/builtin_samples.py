"""Samples of the core's own plugins: NumPy, local directories, memory."""

from __future__ import annotations

import dataclasses
import uuid
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from ckptcore.model import AbstractArray
from ckptcore_testing.arrays import DTYPE_NAMES
from ckptcore_testing.samples import ContainerSample, FrameworkSample, StorageSample

_Named = namedtuple("_Named", ("first", "second"))


@dataclasses.dataclass
class _Fields:
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class _FrozenFields:
    first: Any
    second: Any


NUMPY: Final = FrameworkSample(
    name="numpy",
    dtypes=DTYPE_NAMES,
    make=lambda elements: np.array(elements, order="C", copy=True),
    abstract=lambda spec: AbstractArray(spec.shape, spec.numpy_dtype),
    elements=np.asarray,
    array_type=np.ndarray,
    fills=True,
    containers=(
        ContainerSample("dict", lambda two: {"first": two[0], 1: two[1]}, lambda made: list(made.values())),
        ContainerSample(
            "OrderedDict",
            lambda two: OrderedDict([("z", two[0]), ("a", two[1])]),
            lambda made: [made["z"], made["a"]],
        ),
        ContainerSample("list", list, list),
        ContainerSample("tuple", tuple, list),
        ContainerSample("namedtuple", lambda two: _Named(*two), lambda made: [made.first, made.second]),
        ContainerSample("dataclass", lambda two: _Fields(*two), lambda made: [made.first, made.second]),
        ContainerSample("frozen dataclass", lambda two: _FrozenFields(*two), lambda made: [made.first, made.second]),
        ContainerSample(
            "nested",
            lambda two: {"a.b": two[0], "a": {"b": [(two[1], None, {})], "empty": []}},
            lambda made: [made["a.b"], made["a"]["b"][0][0]],
        ),
    ),
)
"""NumPy arrays, and Python's own containers."""


@contextmanager
def _open_file(directory: Path) -> Iterator[str]:
    yield str(directory / "checkpoint")


@contextmanager
def _open_memory(directory: Path) -> Iterator[str]:
    yield f"memory://{uuid.uuid4().hex}/checkpoint"


FILE: Final = StorageSample(scheme="file", open=_open_file)
"""Local directories."""

MEMORY: Final = StorageSample(scheme="memory", open=_open_memory)
"""The memory of this process."""
