"""The layout ocdbt compared with Orbax, which defines this format: both save and load the same JAX arrays in turn."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import torch
from ckptcore_orbax import OcdbtLayout

import ckptcore
from benchmarks.alternating import Case, Contender, compare, huge
from benchmarks.local import Clearing, read_raw, write_raw
from benchmarks.report import Row
from benchmarks.setting import Setting
from benchmarks.states import large_state, small_state

Arrays = dict[str, jax.Array]

_FULL = ckptcore.Context()
_FAST = ckptcore.Context(durability="none")


def rows(setting: Setting) -> Iterator[Row]:
    """Measure many small arrays, and one large state."""
    orbax = Orbax()
    small = jax_state(small_state(setting.count(1000)))
    yield from _cases(setting, "small", orbax, small, _small_cases)
    large = jax_state(large_state(0.75 * setting.scale))
    yield from _cases(setting, "large", orbax, large, _large_cases)


def _cases(
    setting: Setting,
    name: str,
    orbax: Orbax,
    arrays: Arrays,
    cases: Callable[[Path, Orbax, Arrays], Sequence[Case]],
) -> Iterator[Row]:
    directory = setting.directory / name
    directory.mkdir()
    for case in (*cases(directory, orbax, arrays), _blocking_case(directory, orbax, arrays)):
        yield from compare(case, setting.rounds)


def jax_state(state: Mapping[str, torch.Tensor]) -> Arrays:
    """Return the same elements as arrays of JAX."""
    arrays = {}
    for name, tensor in state.items():
        if tensor.dtype == torch.bfloat16:
            arrays[name] = jax.numpy.asarray(tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)) + 0
        else:
            arrays[name] = jax.numpy.asarray(tensor.numpy()) + 0
    return jax.block_until_ready(arrays)  # type: ignore[no-any-return, no-untyped-call]  # JAX has no type for it


class Orbax:
    """Orbax, version 1, quiet."""

    def __init__(self) -> None:
        from orbax.checkpoint import v1  # type: ignore[import-untyped]  # it has no type stubs

        logging.getLogger("absl").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module="orbax|jax")
        self._v1: Any = v1

    def save(self, location: Path, arrays: Arrays, *, compressed: bool) -> None:
        options = self._v1.options.ArrayOptions
        with self._v1.Context(array_options=options(saving=options.Saving(use_compression=compressed))):
            self._v1.save(location, arrays)

    def save_async(self, location: Path, arrays: Arrays) -> Any:
        return self._v1.save_async(location, arrays)

    def load(self, location: Path) -> object:
        return jax.block_until_ready(self._v1.load(location))  # type: ignore[no-untyped-call]  # JAX has no type for it

    def metadata(self, location: Path) -> object:
        return self._v1.metadata(location)


def _load(location: Path, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> object:
    return jax.block_until_ready(ckptcore.load(location, abstract))  # type: ignore[no-untyped-call]  # JAX has no type for it


def _abstract(arrays: Arrays) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype)  # type: ignore[no-untyped-call]  # JAX has no type for it
        for name, array in arrays.items()
    }


def _large_cases(directory: Path, orbax: Orbax, arrays: Arrays) -> Sequence[Case]:
    total = sum(array.nbytes for array in arrays.values())
    views = [np.asarray(array).view(np.int16).reshape(-1) for array in arrays.values()]
    return [*_save_cases(directory, orbax, arrays, views, total), *_load_cases(directory, orbax, arrays, views, total)]


def _save_cases(directory: Path, orbax: Orbax, arrays: Arrays, views: Sequence[Any], total: int) -> Sequence[Case]:
    theirs, ours, raw = directory / "orbax", directory / "ocdbt", directory / "written"
    clear = Clearing(theirs, ours, raw)
    save = partial(ckptcore.save, ours, arrays)
    compressed = OcdbtLayout(compression="zstd")
    case = partial(Case, nbytes=total, writes=True)
    return [
        case(
            "orbax: save",
            [
                Contender("ckptcore.save, ocdbt", lambda: save(layout="ocdbt", context=_FULL), clear),
                Contender(
                    "Orbax v1, its default (zstd)",
                    lambda: orbax.save(theirs, arrays, compressed=True),
                    clear,
                    target=5.0,
                ),
                Contender("Orbax v1", lambda: orbax.save(theirs, arrays, compressed=False), clear, target=2.0),
                Contender("raw pwrite + fdatasync", lambda: write_raw(raw, views, total, durable=True), clear),
                Contender("ckptcore.save, not durable", lambda: save(layout="ocdbt", context=_FAST), clear),
                Contender("ckptcore.save, zstd", lambda: save(layout=compressed, context=_FULL), clear),
            ],
        ),
    ]


def _load_cases(directory: Path, orbax: Orbax, arrays: Arrays, views: Sequence[Any], total: int) -> Sequence[Case]:
    zstd, plain, ready = directory / "ready-zstd", directory / "ready-plain", directory / "ready-ocdbt"
    orbax.save(zstd, arrays, compressed=True)
    orbax.save(plain, arrays, compressed=False)
    ckptcore.save(ready, arrays, layout="ocdbt", context=_FAST)
    raw = directory / "raw"
    write_raw(raw, views, total)
    abstract = _abstract(arrays)
    return [
        Case(
            "orbax: load",
            [
                Contender("ckptcore.load", lambda: _load(ready, abstract)),
                Contender("Orbax v1, its default (zstd)", lambda: orbax.load(zstd), target=8.0),
                Contender("Orbax v1, no compression", lambda: orbax.load(plain), target=4.0),
                Contender("raw preadv, huge pages, 2 threads", lambda: read_raw(raw, huge(total)), target=0.7),
                Contender("ckptcore.load (NumPy)", lambda: ckptcore.load(ready)),
            ],
            total,
        ),
        Case(
            "orbax: load what Orbax saved",
            [
                Contender("ckptcore.load", lambda: _load(plain, abstract)),
                Contender("Orbax v1", lambda: orbax.load(plain)),
            ],
            total,
        ),
        Case(
            "orbax: load what Orbax saved with zstd",
            [
                Contender("ckptcore.load", lambda: _load(zstd, abstract)),
                Contender("Orbax v1", lambda: orbax.load(zstd), target=1.0),
            ],
            total,
        ),
    ]


def _small_cases(directory: Path, orbax: Orbax, arrays: Arrays) -> Sequence[Case]:
    theirs, ours = directory / "orbax", directory / "ocdbt"
    clear = Clearing(theirs, ours)
    their_ready, ready = directory / "ready-orbax", directory / "ready-ocdbt"
    orbax.save(their_ready, arrays, compressed=True)
    ckptcore.save(ready, arrays, layout="ocdbt", context=_FAST)
    abstract = _abstract(arrays)
    count = len(arrays)
    return [
        Case(
            f"orbax: save {count} small",
            [
                Contender("ckptcore.save, ocdbt", lambda: ckptcore.save(ours, arrays, layout="ocdbt"), clear),
                Contender("Orbax v1", lambda: orbax.save(theirs, arrays, compressed=True), clear, target=10.0),
            ],
            writes=True,
        ),
        Case(
            f"orbax: load {count} small",
            [
                Contender("ckptcore.load", lambda: _load(ready, abstract)),
                Contender("Orbax v1", lambda: orbax.load(their_ready), target=10.0),
                Contender("ckptcore.load (NumPy)", lambda: ckptcore.load(ready)),
                Contender("ckptcore.load of Orbax's", lambda: _load(their_ready, abstract)),
            ],
        ),
        Case(
            f"orbax: metadata of {count} small",
            [
                Contender("ckptcore.metadata", lambda: ckptcore.metadata(ready)),
                Contender("Orbax v1", lambda: orbax.metadata(their_ready), target=10.0),
                Contender("ckptcore.metadata of Orbax's", lambda: ckptcore.metadata(their_ready)),
            ],
        ),
    ]


def _blocking_case(directory: Path, orbax: Orbax, arrays: Arrays) -> Case:
    """Compare the time for which an asynchronous save blocks its caller."""
    theirs, ours = directory / "orbax-async", directory / "ocdbt-async"
    clear = Clearing(theirs, ours)

    def finish(pending: Any) -> None:
        pending.result()

    return Case(
        f"orbax: save_async of {len(arrays)} arrays blocks",
        [
            Contender(
                "ckptcore.save_async, ocdbt",
                lambda: ckptcore.save_async(ours, arrays, layout="ocdbt"),
                clear,
                after=finish,
            ),
            Contender("Orbax v1", lambda: orbax.save_async(theirs, arrays), clear, after=finish, target=1.0),
        ],
        writes=True,
    )
