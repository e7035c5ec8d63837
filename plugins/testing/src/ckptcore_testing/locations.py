"""Locations for tests: new directories, and storages with faults, interruptions or a simulated disk."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal

import ckptcore
from ckptcore.commit.location import open_directory
from ckptcore.errors import AtomicityError
from ckptcore.hookspecs import hookimpl
from ckptcore.plugins import installed_plugins
from ckptcore.protocols import StorageBackend, StorageOpener, StorageOptions
from ckptcore.runtime import runtime_of
from ckptcore_testing.faults import FaultPlan, Step
from ckptcore_testing.faulty_storage import FaultyDirectories, with_faults, with_storage
from ckptcore_testing.simulated_disk import SimulatedDisk
from ckptcore_testing.simulated_storage import open_simulated

_numbers = itertools.count()

SCHEME: Final = "tested"
"""The URL scheme of tested storages."""


def new_place(scheme: str, directory: Path) -> str:
    """Return the URL of a new directory, on a file system or in memory."""
    name = f"place-{next(_numbers)}"
    return f"file://{directory}/{name}/step" if scheme == "file" else f"memory://{directory.name}-{name}/step"


def store_at(location: str) -> StorageBackend:
    """Open the storage of a location."""
    return open_directory(location, runtime_of(ckptcore.Context()).storages)


def await_later_times(directory: Path) -> None:
    """Wait until changed files get later times than before, because the clock of a file system advances in steps."""
    probe = directory / "probe"
    probe.touch()
    before = probe.stat().st_mtime_ns
    while probe.stat().st_mtime_ns == before:
        probe.touch()
    probe.unlink()


def objects_at(location: str) -> dict[str, bytes]:
    """Return the bytes of each object below a location."""
    store = store_at(location)
    return {key: store.get(key) for key in store.list()}


class _Plugin:
    def __init__(self, opener: StorageOpener) -> None:
        self._opener = opener

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        return {SCHEME: self._opener}


def _open_with_faults(
    scheme: str, plan: FaultPlan, exchanges: bool, url: str, options: StorageOptions
) -> StorageBackend:
    inner = url.replace(SCHEME, scheme, 1)
    storage = with_faults(installed_plugins().storage(scheme)(inner, options), plan)
    if exchanges or not isinstance(storage, FaultyDirectories):
        return storage
    return _WithoutExchange(storage.inner, storage, plan)


class _WithoutExchange(FaultyDirectories):
    """Directories on a file system that cannot exchange directories."""

    def exchange(self, first: str, second: str) -> None:
        """Raise the error of a file system without this operation."""
        raise AtomicityError(f"cannot exchange {first} and {second} here")


def through(location: str) -> str:
    """Return the URL of a location in a `faulty_context`."""
    return SCHEME + location[location.index("://") :]


def faulty_context(location: str, plan: FaultPlan, *, exchanges: bool = True) -> ckptcore.Context:
    """Return a Context of a simulated process whose storage has faults. Use it with ``through(location)``."""
    scheme = location[: location.index("://")]
    opener = functools.partial(_open_with_faults, scheme, plan, exchanges)
    # One thread, so that operations always have the same order.
    context = ckptcore.Context(
        plugins=ckptcore.context.PluginOptions(extra=(_Plugin(opener),)),
        io=ckptcore.context.IOOptions(threads=1),
        durability="none",
    )
    return with_storage(context, SCHEME, opener)


def simulated_context(disk: SimulatedDisk, durability: Literal["full", "none"] = "full") -> ckptcore.Context:
    """Return a Context of a simulated process on a machine with a disk. Locations are ``tested://...``."""
    opener = functools.partial(open_simulated, disk)
    context = ckptcore.Context(
        plugins=ckptcore.context.PluginOptions(extra=(_Plugin(opener),)),
        io=ckptcore.context.IOOptions(threads=1),
        durability=durability,
    )
    return with_storage(context, SCHEME, opener)


class InterruptedPlan(FaultPlan):
    """A plan without faults. Before one operation, this process pauses and the function `meanwhile` runs."""

    def __init__(self, operation: int, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self._operation = operation
        self._meanwhile = meanwhile
        self.interrupted = False

    def begin(self, name: str, keys: tuple[str, ...] | list[str], offset: int = 0, nbytes: int = 0) -> Step:  # type: ignore[override]  # callers pass a Sequence
        """Pause before the operation."""
        if len(self.operations) == self._operation and not self.interrupted:
            self.interrupted = True
            self._meanwhile()
        return super().begin(name, keys, offset, nbytes)
