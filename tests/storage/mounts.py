"""File systems that are mounted for a test, and unmounted after it. Tests skip if mounts are not permitted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Final, TypeVar

import pytest

import ckptcore
from tests.storage.missing_program import state

T = TypeVar("T")

_FAST: Final = ckptcore.Context(durability="none")
_MIB: Final = 1 << 20
_ROOT: Final = Path(__file__).parents[2]


class Mounts:
    """Mounts file systems below a directory until it is closed."""

    def __init__(self, directory: Path, closing: ExitStack) -> None:
        self._directory = directory
        self._closing = closing

    def enter(self, opener: Callable[[Path], AbstractContextManager[T]]) -> T:
        """Enter the context manager that a function returns for the directory. Leave it after the test."""
        return self._closing.enter_context(opener(self._directory))

    def run(self, *command: str) -> None:
        """Run a command as root. Skip the test if that is impossible."""
        if os.geteuid() != 0:
            pytest.skip("mounting a file system takes root")
        if shutil.which(command[0]) is None:
            pytest.skip(f"{command[0]} is not installed")
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            pytest.skip(f"{' '.join(command)}: {ended.stderr.strip().splitlines()[0]}")

    def mount(self, at: Path, *command: str) -> Path:
        """Run a command that mounts a file system at its last argument."""
        at.mkdir(exist_ok=True)
        self.run(*command, str(at))
        self._closing.callback(subprocess.run, ["umount", "-l", str(at)], check=True)
        return at

    def tmpfs(self, mib: int = 64, files: int = 0) -> Path:
        """Mount a file system in memory. `files` limits the number of files; 0 is no limit."""
        options = f"size={mib}m,nr_inodes={files}"
        return self.mount(self._directory / "tmpfs", "mount", "-t", "tmpfs", "-o", options, "tmpfs")

    def disk(self, kind: str, mib: int, *options: str, make: tuple[str, ...] = ()) -> Path:
        """Mount a file system on a loop device. `make` has options for mkfs."""
        image = self._directory / f"{kind}.img"
        with open(image, "wb") as file:
            file.truncate(mib * _MIB)
        self.run(f"mkfs.{kind}", "-q", *make, str(image))
        return self.mount(self._directory / kind, "mount", "-o", ",".join(["loop", *options]), str(image))

    def overlay(self) -> Path:
        """Mount a writable layer over a directory that contains the checkpoint "lower"."""
        above = self.tmpfs()
        lower, upper, work = (above / name for name in ("lower", "upper", "work"))
        for directory in (lower, upper, work):
            directory.mkdir()
        ckptcore.save(lower / "lower", state(1), context=_FAST)
        layers = f"lowerdir={lower},upperdir={upper},workdir={work}"
        return self.mount(self._directory / "overlay", "mount", "-t", "overlay", "-o", layers, "overlay")

    def bindfs(self) -> Path:
        """Mount a view of a directory through FUSE."""
        (source := self._directory / "source").mkdir()
        return self.mount(self._directory / "bindfs", "bindfs", str(source))

    def odd(self, options: str) -> Path:
        """Mount a file system of `tests.storage.odd_file_system`."""
        try:
            import fuse  # noqa: F401  # the program imports it, too
        except (ImportError, OSError) as error:
            pytest.skip(f"fusepy or libfuse 2 is missing: {error}")
        if not os.access("/dev/fuse", os.W_OK):
            pytest.skip("/dev/fuse cannot be used")
        (source := self._directory / "source").mkdir()
        (at := self._directory / "fuse").mkdir()
        program = [sys.executable, "-m", "tests.storage.odd_file_system", str(source), str(at), options]
        server = self._closing.enter_context(subprocess.Popen(program, cwd=_ROOT, stderr=subprocess.PIPE, text=True))
        self._closing.callback(server.kill)  # ends the server even if the test left files open
        self._closing.callback(subprocess.run, ["umount", "-l", str(at)], check=False)
        while not os.path.ismount(at):
            if server.poll() is not None:
                pytest.skip(f"FUSE: {server.communicate()[1]}")
        return at

    def view(self, of: Path, kind: str = "bind") -> View:
        """Mount a directory a second time. The mount can be removed during the test."""
        view = View(self, of, self._directory / "view", kind)
        view.give()
        self._closing.callback(subprocess.run, ["umount", "-l", str(view.path)], capture_output=True, check=False)
        return view


class View:
    """A mount of a directory that a test can remove and restore. Locks of the directory do not survive this."""

    def __init__(self, mounts: Mounts, source: Path, path: Path, kind: str) -> None:
        self.path = path
        self._mounts = mounts
        self._command = ["mount", "--bind"] if kind == "bind" else ["bindfs"]
        self._command += [str(source), str(path)]
        path.mkdir(exist_ok=True)

    def give(self) -> None:
        """Mount the directory."""
        self._mounts.run(*self._command)

    def take(self) -> None:
        """Unmount the directory, even while files are open."""
        self._mounts.run("umount", "-l", str(self.path))


def fill(directory: Path) -> None:
    """Fill a file system until no file or directory can be created."""
    for size in (_MIB, 1 << 16, 1 << 12, 1 << 9):
        for number in range(1 << 12):
            try:
                (directory / f"filler-{size}-{number}").write_bytes(bytes(size))
            except OSError:
                break
    for number in range(1 << 12):
        try:
            (directory / f"filler-{number}").mkdir()
        except OSError:
            return
    pytest.fail("the file system is not full")


def unfill(directory: Path) -> None:
    for path in directory.glob("filler-*"):
        path.unlink() if path.is_file() else path.rmdir()


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    """Return file systems that are unmounted after the test."""
    with ExitStack() as closing:
        yield Mounts(tmp_path, closing)
