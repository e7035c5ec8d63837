"""The layout ocdbt against Orbax, at Orbax's own format: the same JAX arrays, saved and loaded by both in turn."""

from __future__ import annotations

import logging
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import torch
from ckptcore_tensorstore import OcdbtLayout

import ckptcore
from benchmarks.alternating import Contender, huge
from benchmarks.cases import Case, Clearing, read_raw, write_raw

__all__ = ["jax_state", "orbax_blocking_rows", "orbax_large_cases", "orbax_peak_rows", "orbax_small_cases"]

Arrays = dict[str, jax.Array]

_FULL = ckptcore.Context()
_FAST = ckptcore.Context(durability="none")

_PEAK = """
import sys, logging, warnings
logging.disable(logging.CRITICAL); warnings.filterwarnings("ignore")
sys.path.insert(0, {root!r})
import jax, ckptcore
from orbax.checkpoint import v1
from benchmarks.orbax import jax_state
from benchmarks.states import large_state
def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
def save(location, arrays):
    if {ours!r}:
        ckptcore.save(location, arrays, layout="ocdbt")
    else:
        with v1.Context(array_options=v1.options.ArrayOptions(saving=v1.options.ArrayOptions.Saving(use_compression={zstd!r}))):
            v1.save(location, arrays)
state = jax_state(large_state({gigabytes}))
save({location!r} + "-warm", {{"w": next(iter(state.values()))[:4]}})
open("/proc/self/clear_refs", "w").write("5")
before = peak()
save({location!r}, state)
print(peak() - before, sum(array.nbytes for array in state.values()))
"""


def jax_state(state: Mapping[str, torch.Tensor]) -> Arrays:
    """The same elements as arrays of JAX."""
    arrays = {}
    for name, tensor in state.items():
        if tensor.dtype == torch.bfloat16:
            arrays[name] = jax.numpy.asarray(tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)) + 0
        else:
            arrays[name] = jax.numpy.asarray(tensor.numpy()) + 0
    return jax.block_until_ready(arrays)  # type: ignore[no-any-return, no-untyped-call]  # JAX has no type for it


class _Orbax:
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


def orbax_large_cases(directory: Path, arrays: Arrays) -> Sequence[Case]:
    """Saving and loading one large state."""
    orbax = _Orbax()
    theirs, ours = directory / "orbax", directory / "ocdbt"
    written = directory / "written"
    prepare = Clearing(theirs, ours, written)
    zstd, plain, ready = directory / "ready-zstd", directory / "ready-plain", directory / "ready-ocdbt"
    orbax.save(zstd, arrays, compressed=True)
    orbax.save(plain, arrays, compressed=False)
    ckptcore.save(ready, arrays, layout="ocdbt", context=_FAST)
    abstract = _abstract(arrays)
    total = sum(array.nbytes for array in arrays.values())
    views = [np.asarray(array).view(np.int16).reshape(-1) for array in arrays.values()]
    raw = directory / "raw"
    write_raw(raw, views, total)
    save = Contender(
        "ckptcore.save, ocdbt", lambda: ckptcore.save(ours, arrays, layout="ocdbt", context=_FULL), prepare
    )
    load = Contender("ckptcore.load", lambda: _load(ready, abstract))
    return [
        Case(
            "orbax: save",
            [
                Contender("Orbax v1, its default (zstd)", lambda: orbax.save(theirs, arrays, compressed=True), prepare),
                save,
            ],
            5.0,
        ),
        Case(
            "orbax: save, no compression",
            [
                Contender("Orbax v1", lambda: orbax.save(theirs, arrays, compressed=False), prepare),
                save,
                Contender("raw pwrite + fdatasync", lambda: write_raw(written, views, total, durable=True), prepare),
            ],
            2.0,
        ),
        Case(
            "orbax: save, other ways",
            [
                Contender("Orbax v1, its default (zstd)", lambda: orbax.save(theirs, arrays, compressed=True), prepare),
                Contender(
                    "ckptcore.save, not durable",
                    lambda: ckptcore.save(ours, arrays, layout="ocdbt", context=_FAST),
                    prepare,
                ),
                Contender(
                    "ckptcore.save, zstd",
                    lambda: ckptcore.save(ours, arrays, layout=OcdbtLayout(compression="zstd"), context=_FULL),
                    prepare,
                ),
            ],
            None,
        ),
        Case("orbax: load", [Contender("Orbax v1, its default (zstd)", lambda: orbax.load(zstd)), load], 8.0),
        Case("orbax: load, no compression", [Contender("Orbax v1", lambda: orbax.load(plain)), load], 4.0),
        Case(
            "orbax: load what Orbax saved",
            [
                Contender("Orbax v1", lambda: orbax.load(plain)),
                Contender("ckptcore.load", lambda: _load(plain, abstract)),
                Contender("ckptcore.load of zstd", lambda: _load(zstd, abstract)),
            ],
            None,
        ),
        Case(
            "orbax: load beside the raw limit",
            [
                Contender("raw preadv, huge pages, 2 threads", lambda: read_raw(raw, huge(total))),
                load,
                Contender("ckptcore.load (NumPy)", lambda: ckptcore.load(ready)),
            ],
            0.7,
        ),
    ]


def orbax_small_cases(directory: Path, arrays: Arrays) -> Sequence[Case]:
    """1000 arrays of 16 floats, and how long an asynchronous save blocks."""
    orbax = _Orbax()
    theirs, ours = directory / "orbax-small", directory / "ocdbt-small"
    prepare = Clearing(theirs, ours)
    orbax_ready, ready = directory / "ready-orbax-small", directory / "ready-ocdbt-small"
    orbax.save(orbax_ready, arrays, compressed=True)
    ckptcore.save(ready, arrays, layout="ocdbt", context=_FAST)
    abstract = _abstract(arrays)
    return [
        Case(
            "orbax: save 1000 small",
            [
                Contender("Orbax v1", lambda: orbax.save(theirs, arrays, compressed=True), prepare),
                Contender("ckptcore.save, ocdbt", lambda: ckptcore.save(ours, arrays, layout="ocdbt"), prepare),
            ],
            10.0,
        ),
        Case(
            "orbax: load 1000 small",
            [
                Contender("Orbax v1", lambda: orbax.load(orbax_ready)),
                Contender("ckptcore.load", lambda: _load(ready, abstract)),
                Contender("ckptcore.load (NumPy)", lambda: ckptcore.load(ready)),
                Contender("ckptcore.load of Orbax's", lambda: _load(orbax_ready, abstract)),
            ],
            10.0,
        ),
        Case(
            "orbax: metadata of 1000 small",
            [
                Contender("Orbax v1", lambda: orbax.metadata(orbax_ready)),
                Contender("ckptcore.metadata", lambda: ckptcore.metadata(ready)),
                Contender("ckptcore.metadata of Orbax's", lambda: ckptcore.metadata(orbax_ready)),
            ],
            10.0,
        ),
    ]


def orbax_blocking_rows(directory: Path, arrays: Arrays, name: str, rounds: int) -> Iterator[tuple[str, bool]]:
    """How long an asynchronous save blocks its caller, in turn; rows to print, and whether ours blocks no longer."""
    orbax = _Orbax()
    theirs, ours = directory / "orbax-async", directory / "ocdbt-async"
    clear = Clearing(theirs, ours)
    blocked: dict[str, list[float]] = {"Orbax v1": [], "ckptcore.save_async, ocdbt": []}
    for number in range(-1, rounds):
        for contender, start_save in (
            ("Orbax v1", lambda: orbax.save_async(theirs, arrays)),
            ("ckptcore.save_async, ocdbt", lambda: ckptcore.save_async(ours, arrays, layout="ocdbt")),
        ):
            clear()
            start = time.perf_counter()
            pending = start_save()
            seconds = time.perf_counter() - start
            pending.result()
            if number >= 0:
                blocked[contender].append(seconds)
    peer = statistics.median(blocked["Orbax v1"])
    for contender, seconds_of in blocked.items():
        own = statistics.median(seconds_of)
        verdict = "" if contender == "Orbax v1" else f"1.00 {'reached' if own <= peer else 'MISSED'}"
        yield f"{name:42} {contender:36} {own * 1e3:7.2f} ms {peer / own:7.2f}  {verdict}", own <= peer


def orbax_peak_rows(scratch: Path, gigabytes: float) -> Iterator[tuple[str, bool]]:
    """Memory above the state that a blocking save takes, in processes of their own."""
    root = str(Path(__file__).parents[1])
    for name, ours, zstd in (
        ("Orbax v1", False, True),
        ("Orbax v1, no compression", False, False),
        ("ckptcore.save, ocdbt", True, False),
    ):
        program = _PEAK.format(
            root=root, location=str(scratch / f"peak-{name[0]}-{zstd}"), gigabytes=gigabytes, ours=ours, zstd=zstd
        )
        done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
        above, size = map(int, done.stdout.split()[-2:])
        reached = not ours or above <= size / 10
        verdict = f"0.10 {'reached' if reached else 'MISSED'}" if ours else ""
        yield (
            f"{'orbax: peak memory of save / state':42} {name:36} {above / 2**20:6.0f} MiB {above / size:7.2f}  {verdict}",
            reached,
        )
