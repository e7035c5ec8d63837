"""A model of a disk that can lose unsynced data. Its input is the system calls of a real save.

The model makes no assumption about the order in which a file system writes unsynced data. Each change of names in a
directory, and each write to a file, may or may not have reached the disk. A rename within a directory is atomic. After
a rename between directories, either name may be lost, or both may exist.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

CALLS: Final = (
    "openat", "mkdir", "write", "pwrite64", "fallocate", "fsync", "fdatasync", "rename", "renameat2", "unlink",
    "unlinkat",
    "rmdir",
)  # fmt: skip
"""The system calls that the model knows. If a save makes any other call that changes something, the tests fail."""

_LINE: Final = re.compile(r"\d+ +(\w+)\((.*)\) += (-?\d+)")
_STRING: Final = re.compile(r'"((?:\\x[0-9a-f]{2})*)"(\.\.\.)?')
_OPEN_FILE: Final = re.compile(r"^\d+<((?:\\x[0-9a-f]{2})*)>")
_UNFINISHED: Final = "<unfinished ...>"
_RESUMED: Final = re.compile(r" *<\.\.\. \w+ resumed>")
_FIRST_FILE: Final = re.compile(r"\d+<((?:\\x[0-9a-f]{2})*)>")
_PATH: Final = re.compile(r'["<]((?:\\x[0-9a-f]{2})*)[">]')
_SECTOR: Final = 512


@dataclass(frozen=True)
class Call:
    """A system call that succeeded.

    Attributes:
        name: the name of the call.
        paths: the paths in the call, in order. For an open file, its present or former path.
        data: the bytes to write.
        number: the offset of a write, or the number of bytes of another call.
        flags: the arguments as text.
    """

    name: str
    paths: Sequence[str]
    data: bytes = b""
    number: int = 0
    flags: str = ""


def calls_in(log: Path) -> Iterator[Call]:
    """Yield the calls in a log of ``strace -f -y -xx``, in order. Omits calls that failed or change nothing.

    Also omits calls for temporary files between an object and a checkpoint, which need not survive a power loss.
    """
    for call in _all_calls_in(log):
        if not all("/ckptcore-staging-" in path for path in call.paths):
            yield call


def _whole_lines(log: Path) -> Iterator[str]:
    """Yield one line for each call, where the call ended. strace writes two lines if calls of threads overlap.

    Omits a sync that overlaps with changes of the same file or directory, because it may not cover these changes.
    """
    begun: dict[str, tuple[str, list[str]]] = {}
    for line in log.read_text().splitlines():
        thread, _, text = line.partition(" ")
        if (resumed := _RESUMED.match(text)) is not None:
            beginning, meanwhile = begun.pop(thread)
            text = beginning + text[resumed.end() :]
            synced = _FIRST_FILE.search(beginning) if "sync(" in beginning else None
            if synced is not None and any(_changes(other, synced[1]) for other in meanwhile):
                continue
        elif text.endswith(_UNFINISHED):
            begun[thread] = text.removesuffix(_UNFINISHED).rstrip(), []
        for other, (_, seen) in begun.items():
            if other != thread:
                seen.append(text)
        if not text.endswith(_UNFINISHED):
            yield f"{thread} {text}"


def _changes(text: str, path: str) -> bool:
    """Return True if a call, as strace prints it, changes bytes of a file or names in a directory."""
    name, paths = text.partition("(")[0], _PATH.findall(text)
    if name in ("fsync", "fdatasync") or (name == "openat" and "O_CREAT" not in text):
        return False
    return path in paths or any(other.rpartition("\\x2f")[0] == path for other in paths if "write" not in name)


def _all_calls_in(log: Path) -> Iterator[Call]:
    for line in _whole_lines(log):
        matched = _LINE.match(line)
        if matched is None or int(matched[3]) < 0:
            continue
        name, arguments = matched[1], matched[2]
        strings = [bytes.fromhex(text.replace("\\x", "")) for text, _ in _STRING.findall(arguments)]
        assert not any(cut for _, cut in _STRING.findall(arguments)), "strace cut a string off"
        open_file = _OPEN_FILE.match(arguments)
        of_file = [os.fsdecode(bytes.fromhex(open_file[1].replace("\\x", "")))] if open_file else []
        numbers = [int(part) for part in re.findall(r", (\d+)(?=,|$)", _STRING.sub("", arguments))]
        if name == "openat":
            if "O_CREAT" in arguments:
                yield Call(name, [os.fsdecode(strings[0])])
        elif name in ("write", "pwrite64"):
            assert len(strings[0]) == int(matched[3]), "a write was cut short, which the model does not know"
            yield Call(name, of_file, strings[0], numbers[-1] if name == "pwrite64" else -1)
        elif name == "fallocate":
            yield Call(name, of_file, number=numbers[-1])
        elif name in ("fsync", "fdatasync"):
            yield Call(name, of_file)
        elif name == "unlinkat":
            yield Call(name, [os.path.join(of_file[0], os.fsdecode(strings[0]))], flags=arguments)
        else:
            yield Call(name, [os.fsdecode(text) for text in strings], flags=arguments)


@dataclass(eq=False)
class _File:
    """The synced bytes of a file, and the writes that may or may not have reached the disk."""

    durable: bytes = b""
    pending: list[tuple[int, bytes]] = field(default_factory=list)
    size: int = 0

    def sync(self) -> None:
        self.durable = self.after(self.pending)
        self.pending = []

    def after(self, writes: Sequence[tuple[int, bytes]]) -> bytes:
        content = bytearray(self.durable)
        for offset, data in writes:
            content.extend(b"\0" * (offset + len(data) - len(content)))
            content[offset : offset + len(data)] = data
        return bytes(content)


@dataclass(eq=False)
class _Directory:
    """The names of a directory on the disk, the names that programs see, and the changes between the two."""

    durable: dict[str, _Node] = field(default_factory=dict)
    seen: dict[str, _Node] = field(default_factory=dict)
    pending: list[dict[str, _Node | None]] = field(default_factory=list)

    def change(self, change: dict[str, _Node | None]) -> None:
        self.pending.append(change)
        _apply(self.seen, change)

    def sync(self) -> None:
        for change in self.pending:
            _apply(self.durable, change)
        self.pending = []


_Node: TypeAlias = _File | _Directory


def _apply(names: dict[str, _Node], change: Mapping[str, _Node | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class Disk:
    """A model of the tree below one directory."""

    def __init__(self, root: Path) -> None:
        """Create the model from the existing files and directories. All of them are durable."""
        self._root = str(root)
        self._tree = _read_tree(root)

    def perform(self, call: Call) -> None:
        """Apply a system call to the model."""
        if not all(self._is_here(path) for path in call.paths):
            assert not any(self._is_here(path) for path in call.paths), f"a call across the border: {call}"
            return
        if call.name in ("openat", "mkdir"):
            directory, name = self._place(call.paths[0])
            if name not in directory.seen:
                directory.change({name: _Directory() if call.name == "mkdir" else _File()})
        elif call.name in ("fsync", "fdatasync"):
            self._find(call.paths[0]).sync()
        elif call.name in ("rename", "renameat2"):
            self._rename(call)
        elif call.name in ("unlink", "unlinkat", "rmdir"):
            directory, name = self._place(call.paths[0])
            directory.change({name: None})
        else:
            self._write(call)

    def _write(self, call: Call) -> None:
        file = self._find(call.paths[0])
        assert isinstance(file, _File)
        data = bytes(call.number) if call.name == "fallocate" else call.data
        offset = 0 if call.name == "fallocate" else file.size if call.number < 0 else call.number
        file.pending.append((offset, data))
        if call.name != "fallocate" and call.number < 0:
            file.size += len(data)

    def _rename(self, call: Call) -> None:
        (directory, old), (other, new) = map(self._place, call.paths)
        moved = directory.seen[old]
        if directory is not other:
            assert "RENAME_EXCHANGE" not in call.flags, "the model knows only exchanges within a directory"
            other.change({new: moved})
            directory.change({old: None})
            return
        if "RENAME_EXCHANGE" in call.flags:
            directory.change({old: directory.seen[new], new: moved})
        else:
            directory.change({old: None, new: moved})

    def _is_here(self, path: str) -> bool:
        return path == self._root or path.startswith(self._root + "/")

    def _find(self, path: str) -> _Node:
        node: _Node = self._tree
        for part in path[len(self._root) :].split("/"):
            if part:
                assert isinstance(node, _Directory)
                node = node.seen[part]
        return node

    def _place(self, path: str) -> tuple[_Directory, str]:
        above, _, name = path.rpartition("/")
        directory = self._find(above)
        assert isinstance(directory, _Directory)
        return directory, name

    def after_power_loss(self, target: Path, keep: Callable[[], bool], choices: random.Random) -> None:
        """Write a possible content of the disk after a power loss.

        Args:
            target: an empty directory.
            keep: called for each unsynced change. Returns True if the change reached the disk.
            choices: chooses the positions at which writes are torn.
        """
        _write_tree(self._tree, target, keep, choices)


def _read_tree(path: Path) -> _Directory:
    names: dict[str, _Node] = {}
    for entry in path.iterdir():
        names[entry.name] = _read_tree(entry) if entry.is_dir() else _File(entry.read_bytes())
    return _Directory(dict(names), names)


def _write_tree(directory: _Directory, target: Path, keep: Callable[[], bool], choices: random.Random) -> None:
    names = dict(directory.durable)
    for change in directory.pending:
        if keep():
            _apply(names, change)
    for name, node in names.items():
        path = target / name
        if isinstance(node, _Directory):
            path.mkdir()
            _write_tree(node, path, keep, choices)
        else:
            kept = [_torn(*write, choices) for write in node.pending if keep()]
            path.write_bytes(node.after(kept))


def _torn(offset: int, data: bytes, choices: random.Random) -> tuple[int, bytes]:
    """Return a write, or only its first sectors, as if the others did not reach the disk."""
    if choices.random() < 0.5 or len(data) <= _SECTOR:
        return offset, data
    return offset, data[: choices.randrange(len(data) // _SECTOR + 1) * _SECTOR]
