"""Checks of one fuzzed file: only expected errors, little memory, no executed code, no path outside the directory."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sys
import threading
import tracemalloc
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ckptcore.installed import version_of
from tests.fuzzing.places import Place
from tests.fuzzing.reads import Read
from tests.fuzzing.targets import Target

CORPUS: Final = Path(__file__).parent / "corpus"
"""The seeds: a directory of inputs for each target. Inputs ``crash-*`` once did harm."""

_MEMORY_BYTES: Final = 16 << 20
_MEMORY_FACTOR: Final = 4
"""A call may allocate this many times the size of all files, plus `_MEMORY_BYTES`."""

_NATIVE_BYTES: Final = 256 << 20
"""Bytes by which the whole process may grow in one call, including libraries, which load during the first calls."""

_PATHS: Final[Mapping[str, int]] = {
    "open": 1, "os.listdir": 1, "os.scandir": 1, "os.mkdir": 1, "os.remove": 1, "os.rmdir": 1, "os.rename": 2,
    "os.link": 2, "os.symlink": 2, "os.truncate": 1, "os.chmod": 1, "os.chown": 1, "os.utime": 1,
    "os.setxattr": 1, "os.getxattr": 1, "shutil.rmtree": 1,
}  # fmt: skip
"""Audit events of file operations, with the number of leading arguments that are paths."""

_CODE: Final = frozenset(
    {"exec", "pickle.find_class", "marshal.loads", "marshal.load", "code.__new__", "ctypes.dlopen"}
)
"""Audit events of executed code. `compile` is not one: it runs nothing, and tracebacks parse source code."""

_FORBIDDEN: Final = frozenset(
    {"os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "subprocess.Popen",
     "socket.connect", "socket.getaddrinfo", "urllib.Request", "os.putenv", "os.kill"}
)  # fmt: skip


class HarmError(AssertionError):
    """Harm of a file that is not an unexpected error."""


class Observer:
    """Observes the process during a check with an audit hook. There is only one, because hooks cannot be removed."""

    def __init__(self) -> None:
        self._inside = ""
        self._data = b""
        self._seen: list[str] = []
        self._thread = 0
        version_of("ckptcore")  # cache the version now, because errors contain it
        sys.addaudithook(self._observe)

    @contextlib.contextmanager
    def watch(self, inside: Path, data: bytes) -> Iterator[None]:
        """Raise HarmError if code runs or a path outside a directory is used.

        Args:
            inside: the directory.
            data: the fuzzed input. A module whose name is in the input must not be imported.
        """
        self._data, self._seen, self._thread = data, [], threading.get_ident()
        self._inside = f"{inside}/"
        try:
            yield
        finally:
            self._inside = ""
        if self._seen:
            raise HarmError(f"this happened: {'; '.join(self._seen[:5])}")

    def _observe(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._inside or not self._is_reader():
            return
        if event in _PATHS:
            for path in arguments[: _PATHS[event]]:
                if not isinstance(path, int | None) and not self._is_allowed(os.fsdecode(path)) and not _is_importing():
                    self._seen.append(f"{event} {path!r}")
        elif event == "import":
            name = arguments[0]
            if len(name) > 2 and name.encode() in self._data and not name.startswith("ckptcore"):
                self._seen.append(f"import {name}")
        elif event in _FORBIDDEN or (event in _CODE and not _is_importing()):
            self._seen.append(f"{event} {arguments!r}"[:500])

    def _is_reader(self) -> bool:
        """Return False for threads that other tests of this process left running."""
        return threading.get_ident() == self._thread or threading.current_thread().name == "ckptcore-io"

    def _is_allowed(self, path: str) -> bool:
        if ".." in path.split("/"):
            return False
        # Relative paths are allowed, because they are inside an open directory. Source files are read for tracebacks.
        within = (self._inside, "/proc/", "/sys/")
        return not path.startswith("/") or f"{path}/".startswith(within) or path.endswith(".py")


def _is_importing() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class Checker:
    """Checks of the inputs of a target. The first byte of an input is the number of its place.

    Attributes:
        succeeded: for each place, the number of calls that can read its intact files.
    """

    def __init__(self, target: Target, directory: Path, observer: Observer) -> None:
        """Create the directories of the places.

        Args:
            target: the target.
            directory: an empty directory, in memory if possible.
            observer: the observer of this process.
        """
        self._target = target
        self._places = list(target.places())
        self._directories = [directory / str(number) for number in range(len(self._places))]
        self._observer = observer
        for number in range(len(self._places)):
            self._create(number)
        # Run all calls once without checks, because they load libraries at first use, some only for unknown formats.
        for read in target.reads:
            self._read(b"\0x", read)
        self.succeeded = [sum([self._read(data, read) for read in target.reads]) for data in self.samples()]

    def samples(self) -> list[bytes]:
        """Return the inputs that produce intact files."""
        return [bytes([number]) + fuzzed.sample for number, fuzzed in enumerate(self._places)]

    def place_of(self, data: bytes) -> Place:
        """Return the place of an input that is not empty."""
        return self._places[self._number(data)]

    def check(self, data: bytes) -> None:
        """Read an input by every call, with traced memory.

        Raises:
            HarmError: the input did harm.
            Exception: an unexpected error.
        """
        for read in self._target.reads if data else ():
            tracemalloc.start(1)
            try:
                self._check(data, read)
            finally:
                tracemalloc.stop()

    def check_quickly(self, data: bytes) -> None:
        """Read an input by one of the calls, which depends only on the input. Memory is traced for one of 32 inputs.

        Tracing makes a call several times slower. If the address space of the
        process is limited, large allocations also fail without tracing.
        """
        if data:
            number = zlib.crc32(data)
            if number % 32 == 0:
                self.check(data)
            else:
                self._check(data, self._target.reads[number % len(self._target.reads)])

    def _check(self, data: bytes, read: Read) -> None:
        before = _process_bytes()
        with self._observer.watch(self._directories[self._number(data)], data):
            self._read(data, read)
        peak, grown = tracemalloc.get_traced_memory()[1], _process_bytes() - before
        limit = _MEMORY_BYTES + _MEMORY_FACTOR * self._stored_bytes(data)
        if peak > limit:
            raise HarmError(f"{read.__name__} allocated {peak} bytes, expected at most {limit}")
        if grown > _NATIVE_BYTES + limit:
            raise HarmError(f"{read.__name__} let the process grow by {grown} bytes")

    def _read(self, data: bytes, read: Read) -> bool:
        """Write the files of an input and read them. Return False after an expected error."""
        number = self._number(data)
        fuzzed, directory = self._places[number], self._directories[number]
        if self._target.writes:
            shutil.rmtree(directory)
            self._create(number)
        for key, content in fuzzed.build(data[1:]).items():
            (directory / "c" / key).write_bytes(content)
        try:
            read(directory / "c" / fuzzed.location)
        except self._target.expected:
            return False
        return True

    def _number(self, data: bytes) -> int:
        return min(data[0], len(self._places) - 1)

    def _stored_bytes(self, data: bytes) -> int:
        fuzzed = self._places[self._number(data)]
        return sum(map(len, {**fuzzed.files, **fuzzed.build(data[1:])}.values()))

    def _create(self, number: int) -> None:
        for key, content in self._places[number].files.items():
            path = self._directories[number] / "c" / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def _process_bytes() -> int:
    """Return the peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
