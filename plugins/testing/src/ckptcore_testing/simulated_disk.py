"""A simulated disk in memory that can lose power: only synced data is guaranteed to survive.

It simulates the worst case that file systems allow. The data of a file survives if it has not changed since its last
sync. Otherwise the old data, the new data, any mix of their pages, or only the new size (with zeros as data) survives.
A change of names (create, remove, rename, exchange) after the last sync of its directory survives completely or not at
all, in any combination with other changes. A rename can survive without the data of the file.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from ckptcore_testing.faults import SimulatedCrash

_PAGE_BYTES: Final = 4096


_NUMBERS: Final = itertools.count(1)


@dataclass(eq=False, slots=True)
class DiskFile:
    """A file.

    Attributes:
        data: the data that readers see.
        durable: the data at the last sync, which survives if `data` does not change afterwards. None before the first
            sync.
        number: identifies the file, also after a power loss, as an inode number does.
    """

    data: bytearray = field(default_factory=bytearray)
    durable: bytes | None = None
    number: int = field(default_factory=lambda: next(_NUMBERS))


@dataclass(eq=False, slots=True)
class DiskDirectory:
    """A directory.

    Attributes:
        names: the names that readers see.
        durable: the names that are guaranteed to survive.
        ages: for each name, the number of the last change that was applied to `durable`.
    """

    names: dict[str, DiskNode] = field(default_factory=dict)
    durable: dict[str, DiskNode] = field(default_factory=dict)
    ages: dict[str, int] = field(default_factory=dict)


DiskNode: TypeAlias = DiskFile | DiskDirectory


@dataclass(frozen=True, slots=True)
class _Change:
    """An atomic change of names that is not yet durable.

    Attributes:
        number: ascending number of the change.
        names: the directory, the name and the new node of each changed name. A node of None removes the name.
    """

    number: int
    names: tuple[tuple[DiskDirectory, str, DiskNode | None], ...]


class SimulatedDisk:
    """A simulated file system, and the machine that writes to it.

    `ckptcore_testing.open_simulated` opens storages on it. Each step (create, write, sync, rename, ...) is counted. Run
    the code once and read `steps`. Then run it again on new disks with ``crash_at`` from 0 on, and load from each of
    the disks of `after_power_loss`.

    Attributes:
        steps: descriptions of the steps so far, in order.
        lock: protects all reads and changes.
        locked: the directories that a storage has locked.
    """

    def __init__(self, *, crash_at: int | None = None) -> None:
        """Create an empty disk.

        Args:
            crash_at: number of the step before which the power fails. This and all later steps raise `SimulatedCrash`.
                None: the power does not fail.
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
        """True if the power has failed."""
        return self._crashed

    # --- operations of a file system ----------------------------------------------------------------------------------

    def expect_power(self) -> None:
        """Check that the power has not failed.

        Raises:
            SimulatedCrash: if it has failed.
        """
        if self.crashed:
            raise SimulatedCrash(f"the test cut the power before step {self._crash_at}")

    def _step(self, what: str) -> None:
        if self._crash_at is not None and len(self.steps) >= self._crash_at:
            self._crashed = True
        self.expect_power()
        self.steps.append(what)

    def change(self, what: str, *names: tuple[DiskDirectory, str, DiskNode | None]) -> None:
        """Change names atomically. A node of None removes the name."""
        with self.lock:
            self._step(what)
            for directory, name, node in names:
                if node is None:
                    directory.names.pop(name, None)
                else:
                    directory.names[name] = node
            self._pending.append(_Change(next(self._numbers), names))

    def write(self, what: str, file: DiskFile, offset: int, data: bytes) -> None:
        """Write bytes at an offset. A gap after the end of the file is filled with zeros."""
        with self.lock:
            self._step(what)
            file.data.extend(bytes(max(0, offset + len(data) - len(file.data))))
            file.data[offset : offset + len(data)] = data

    def sync_file(self, what: str, file: DiskFile) -> None:
        """Make the data of a file durable, but not its name."""
        with self.lock:
            self._step(what)
            file.durable = bytes(file.data)

    def has_changed(self, directory: DiskDirectory) -> bool:
        """Return True if a directory has changes that are not durable."""
        return any(changed is directory for change in self._pending for changed, _, _ in change.names)

    def sync_directory(self, what: str, directory: DiskDirectory) -> None:
        """Make the names in a directory durable, but not the data of files or the names in subdirectories."""
        with self.lock:
            self._step(what)
            kept = []
            for change in self._pending:
                if any(changed is directory for changed, _, _ in change.names):
                    _apply(change)
                else:
                    kept.append(change)
            self._pending = kept

    # --- power loss ---------------------------------------------------------------------------------------------------

    def after_power_loss(self, chance: random.Random, count: int = 8) -> Iterator[SimulatedDisk]:
        """Yield possible disks after a power loss. All their data is durable.

        The first disk has only the synced names and data, the second one all names and data, and the third one all
        names but only the synced data. `count` disks with random parts of the unsynced names and data follow.
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
                """Return a copy of a directory's durable names, to which changes can be applied."""
                copy = copies.get(id(directory))
                if copy is None:
                    copy = DiskDirectory(durable=dict(directory.durable), ages=dict(directory.ages))
                    copies[id(directory)] = copy
                return copy

            for change in self._pending:
                if chance.random() < names:
                    _apply(_Change(change.number, tuple([(mutable(at), name, to) for at, name, to in change.names])))
            disk = SimulatedDisk()
            nodes: dict[int, DiskNode] = {}

            def restore(node: DiskNode) -> DiskNode:
                if id(node) in nodes:
                    return nodes[id(node)]
                if isinstance(node, DiskFile):
                    survived = _surviving_bytes(node, chance, data)
                    nodes[id(node)] = file = DiskFile(bytearray(survived), survived, node.number)
                    return file
                nodes[id(node)] = directory = DiskDirectory()
                for name, entry in copies.get(id(node), node).durable.items():
                    directory.names[name] = restore(entry)
                directory.durable = dict(directory.names)
                return directory

            root = restore(self.root)
            assert isinstance(root, DiskDirectory)
            disk.root = root
            return disk


def _apply(change: _Change) -> None:
    """Make a change durable, except for names with a later durable change."""
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
            # Only the size survives.
            return bytes(len(new))
        case _:
            mixed = bytearray(old.ljust(len(new), b"\0")[: len(new)])
            for start in range(0, len(new), _PAGE_BYTES):
                if chance.random() < 0.5:
                    mixed[start : start + _PAGE_BYTES] = new[start : start + _PAGE_BYTES]
            return bytes(mixed)
