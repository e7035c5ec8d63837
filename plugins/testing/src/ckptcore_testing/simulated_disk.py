"""A disk in memory that knows what survives a loss of power: only what was synced, and any part of the rest.

It is as unkind as file systems may be, and no more: data of a file survives up to its last sync, later data survives by
pages in any mix; each change of names (create, remove, rename, exchange) survives whole or not at all once its
directory was not synced after it, in any combination, also a rename without the bytes of the file that was renamed.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from ckptcore_testing.faults import SimulatedCrash

__all__ = ["DiskDirectory", "DiskFile", "SimulatedDisk"]

_PAGE_BYTES: Final = 4096


@dataclass(eq=False, slots=True)
class DiskFile:
    """A file.

    Attributes:
        data: what a reader sees.
        durable: what survives for certain; None before the first sync.
    """

    data: bytearray = field(default_factory=bytearray)
    durable: bytes | None = None


@dataclass(eq=False, slots=True)
class DiskDirectory:
    """A directory.

    Attributes:
        names: what a reader sees.
        durable: what survives for certain.
        ages: for each name the number of the change that `durable` has of it.
    """

    names: dict[str, DiskNode] = field(default_factory=dict)
    durable: dict[str, DiskNode] = field(default_factory=dict)
    ages: dict[str, int] = field(default_factory=dict)


DiskNode: TypeAlias = DiskFile | DiskDirectory


@dataclass(frozen=True, slots=True)
class _Change:
    """Names that change together, not durable yet: directory, name, and what it names then."""

    number: int
    names: tuple[tuple[DiskDirectory, str, DiskNode | None], ...]


class SimulatedDisk:
    """A file system in memory, and the machine that writes to it.

    `ckptcore_testing.open_simulated` opens storages on it. Each step that a real one takes (create, write, sync,
    rename, ...) is counted. Run the code once and look at `steps`; then run it again on fresh disks with ``crash_at``
    from 0 on, and load from each of `after_power_loss`.

    Attributes:
        steps: what was done, in words: one entry per step.
        lock: held while anything is looked at or changed.
        locked: the directories that somebody holds.
    """

    def __init__(self, *, crash_at: int | None = None) -> None:
        """Begin with an empty disk.

        Args:
            crash_at: the number of the step before which the power fails: it and all later ones raise `SimulatedCrash`.
        """
        self.root = DiskDirectory()
        self.steps: list[str] = []
        self.lock = threading.RLock()
        self.locked: set[DiskDirectory] = set()
        self._crash_at = crash_at
        self._crashed = False
        self._pending: list[_Change] = []
        self._numbers = itertools.count(1)

    @property
    def crashed(self) -> bool:
        """Whether the power has failed."""
        return self._crashed

    # --- what a file system does --------------------------------------------------------------------------------------

    def expect_power(self) -> None:
        """Do nothing while there is power.

        Raises:
            SimulatedCrash
        """
        if self.crashed:
            raise SimulatedCrash(f"the test cut the power before step {self._crash_at}")

    def _step(self, what: str) -> None:
        if self._crash_at is not None and len(self.steps) >= self._crash_at:
            self._crashed = True
        self.expect_power()
        self.steps.append(what)

    def change(self, what: str, *names: tuple[DiskDirectory, str, DiskNode | None]) -> None:
        """Let names stand for other things (None: for nothing), all of them at once."""
        with self.lock:
            self._step(what)
            for directory, name, node in names:
                if node is None:
                    directory.names.pop(name, None)
                else:
                    directory.names[name] = node
            self._pending.append(_Change(next(self._numbers), names))

    def write(self, what: str, file: DiskFile, offset: int, data: bytes) -> None:
        """Write bytes, behind the end of the file too."""
        with self.lock:
            self._step(what)
            file.data.extend(bytes(max(0, offset + len(data) - len(file.data))))
            file.data[offset : offset + len(data)] = data

    def sync_file(self, what: str, file: DiskFile) -> None:
        """Make the bytes of a file durable; not its name."""
        with self.lock:
            self._step(what)
            file.durable = bytes(file.data)

    def has_changed(self, directory: DiskDirectory) -> bool:
        """Whether names in a directory are not durable."""
        return any(changed is directory for change in self._pending for changed, _, _ in change.names)

    def sync_directory(self, what: str, directory: DiskDirectory) -> None:
        """Make the names in a directory durable; not the bytes behind them, nor the names in directories below."""
        with self.lock:
            self._step(what)
            kept = []
            for change in self._pending:
                if any(changed is directory for changed, _, _ in change.names):
                    _apply(change)
                else:
                    kept.append(change)
            self._pending = kept

    # --- what survives ------------------------------------------------------------------------------------------------

    def after_power_loss(self, chance: random.Random, count: int = 8) -> Iterator[SimulatedDisk]:
        """Disks that may be found when power is back, with all on them durable.

        First the one where nothing survived that was not synced, then one with all of it, then one with all names and
        no bytes that were not synced, then `count` with parts of both.
        """
        yield self._survivor(chance, names=0.0, data="none")
        yield self._survivor(chance, names=1.0, data="all")
        yield self._survivor(chance, names=1.0, data="none")
        for number in range(count):
            yield self._survivor(chance, names=(0.2, 0.5, 0.8)[number % 3], data="some")

    def _survivor(self, chance: random.Random, *, names: float, data: str) -> SimulatedDisk:
        with self.lock:
            copies: dict[int, DiskDirectory] = {}

            def mutable(directory: DiskDirectory) -> DiskDirectory:
                """The directory's durable names, so that changes can be applied to a copy."""
                copy = copies.get(id(directory))
                if copy is None:
                    copy = DiskDirectory(durable=dict(directory.durable), ages=dict(directory.ages))
                    copies[id(directory)] = copy
                return copy

            for change in self._pending:
                if chance.random() < names:
                    _apply(_Change(change.number, tuple([(mutable(at), name, to) for at, name, to in change.names])))
            found = SimulatedDisk()
            nodes: dict[int, DiskNode] = {}

            def restore(node: DiskNode) -> DiskNode:
                if id(node) in nodes:
                    return nodes[id(node)]
                if isinstance(node, DiskFile):
                    survived = _surviving_bytes(node, chance, data)
                    nodes[id(node)] = file = DiskFile(bytearray(survived), survived)
                    return file
                nodes[id(node)] = directory = DiskDirectory()
                for name, entry in copies.get(id(node), node).durable.items():
                    directory.names[name] = restore(entry)
                directory.durable = dict(directory.names)
                return directory

            root = restore(self.root)
            assert isinstance(root, DiskDirectory)
            found.root = root
            return found


def _apply(change: _Change) -> None:
    """Let a change survive, except where a later one of the same name has."""
    for directory, name, node in change.names:
        if directory.ages.get(name, 0) > change.number:
            continue
        directory.ages[name] = change.number
        if node is None:
            directory.durable.pop(name, None)
        else:
            directory.durable[name] = node


def _surviving_bytes(file: DiskFile, chance: random.Random, data: str) -> bytes:
    old = file.durable or b""
    new = bytes(file.data)
    if data == "all" or file.durable == new:
        return new
    if data == "none":
        return old
    match chance.randrange(4):
        case 0:
            return old
        case 1:
            return new
        case 2:
            # The size survived, pages did not.
            return bytes(len(new))
        case _:
            mixed = bytearray(old.ljust(len(new), b"\0")[: len(new)])
            for start in range(0, len(new), _PAGE_BYTES):
                if chance.random() < 0.5:
                    mixed[start : start + _PAGE_BYTES] = new[start : start + _PAGE_BYTES]
            return bytes(mixed)
