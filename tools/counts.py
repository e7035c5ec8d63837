"""Count what ten operations do: calls of Python functions, system calls, syncs, requests, bytes and memory.

``python -m tools.counts`` prints the present numbers and the limits of ``tests/architecture/test_counts.py``.
``--write`` writes new limits, a little above the present numbers, into that file. Each operation runs in a process with
the core alone, and with no distribution installed, so that numbers do not depend on what else is there. One thread
moves bytes, so that they do not depend on the order of several.

- calls: of functions of the core, on the calling thread and on threads that begin meanwhile. Comprehensions and
  lambdas are parts of the function around them.
- system calls: on files and descriptors, as strace reports them. Others depend on the allocator and on the order of
  threads.
- syncs: those of the system calls that wait for a disk, fsync and fdatasync.
- requests and bytes: to an object store in memory, and what it read and wrote.
- memory: growth of the peak of the process, in MiB. A large array has 32 MiB, so each copy of it adds 32.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

import ckptcore
from tools.isolated import ROOT, environment_without_metadata, packages_without_metadata

# Other modules are imported where they are used: what a first save imports is counted only then.
if TYPE_CHECKING:
    from ckptcore.context import Context

TABLE: Final = ROOT / "tests" / "architecture" / "test_counts.py"
"""The file with the limits."""

_BEGIN_TABLE: Final = "    # written by python -m tools.counts --write\n"
_END_TABLE: Final = "    # end\n"

_LARGE_ELEMENTS: Final = 8 << 20
_SMALL_ARRAYS: Final = 1000
_ROWS: Final = 16
_CORE: Final = f"{Path(ckptcore.__file__).parent}/"

_BEGIN, _END = "/ckptcore-counts-begin", "/ckptcore-counts-end"
"""Files that do not exist. Their names enclose the operation in the output of strace."""

Trace = Mapping[str, Mapping[str, int]]
"""Numbers of calls of functions, by file, relative to the package. Both are in the order of first calls."""

Contexts = Callable[[], "Context"]
"""Returns the same Context each time. The first call creates it."""


class Counts(NamedTuple):
    """Numbers of an operation: see the module. None if they cannot be counted here."""

    calls: int
    system_calls: int | None
    syncs: int | None
    requests: int
    nbytes: int
    memory: int | None

    def exceeds(self, limits: Counts) -> Sequence[str]:
        """Return the numbers that are above a limit, as text."""
        pairs = zip(self._fields, self, limits, strict=True)
        return [
            f"{name}: {number:,}, and the limit is {limit:,}"
            for name, number, limit in pairs
            if number is not None and limit is not None and number > limit
        ]

    def limits(self) -> Counts:
        """Return limits: the numbers, or a little more if threads, versions of Python or file systems change them."""
        calls = self.system_calls
        memory = self.memory
        return Counts(
            self.calls + self.calls // 50 + 20,
            None if calls is None else calls + calls // 50 + 12,
            self.syncs,
            self.requests,
            self.nbytes + self.nbytes // 100 + 100,
            None if memory is None else memory + memory // 20 + 4,
        )


class Operation(NamedTuple):
    """An operation to count.

    Attributes:
        call: returns the operation at a location, which is a directory.
        state: returns the tree that is stored there before, or None.
        first: it is the first one of its process. Others run once before.
        run: the tree is stored as the steps of a run.
    """

    call: Callable[[str, Contexts], Callable[[], object]]
    state: Callable[[], dict[str, Any]] | None = None
    first: bool = False
    run: bool = False

    def store(self, location: str, context: Context) -> None:
        """Store what the operation needs."""
        if self.state is None:
            return
        if not self.run:
            ckptcore.save(f"{location}/stored", self.state(), context=context)
            return
        with ckptcore.Checkpointer(f"{location}/stored", context=context) as checkpointer:
            for step in range(3):
                checkpointer.save(step, self.state())


def _one() -> dict[str, Any]:
    return {"w": np.ones(1 << 18, np.float32)}


def _large() -> dict[str, Any]:
    return {"w": np.ones((_LARGE_ELEMENTS >> 10, 1 << 10), np.float32)}


def _small() -> dict[str, Any]:
    return {f"layers.{number}.weight": np.full(16, number, np.float32) for number in range(_SMALL_ARRAYS)}


def _saving(state: Callable[[], dict[str, Any]]) -> Callable[[str, Contexts], Callable[[], object]]:
    def call(location: str, context: Contexts) -> Callable[[], object]:
        value, numbers = state(), iter(range(9))
        return lambda: ckptcore.save(f"{location}/{next(numbers)}", value, context=context())

    return call


def _loading(location: str, context: Contexts) -> Callable[[], object]:
    return lambda: ckptcore.load(f"{location}/stored", context=context())


def _opening(location: str, context: Contexts) -> Callable[[], object]:
    return lambda: ckptcore.open(f"{location}/stored", context=context()).close()


def _slicing(location: str, context: Contexts) -> Callable[[], object]:
    opened = ckptcore.open(f"{location}/stored", context=context())
    starts = iter(range(0, _LARGE_ELEMENTS >> 10, 1 << 10))  # blocks that no earlier slice has read
    array: Any = opened["w"]

    def slice_rows() -> object:
        start = next(starts)
        return array[start : start + _ROWS]

    return slice_rows


def _metadata(location: str, context: Contexts) -> Callable[[], object]:
    return lambda: ckptcore.metadata(f"{location}/stored", context=context())


def _resuming(location: str, context: Contexts) -> Callable[[], object]:
    target = _large()

    def resume() -> None:
        with ckptcore.Checkpointer(f"{location}/stored", context=context()) as checkpointer:
            checkpointer.wait()  # for the removal of leftovers, which reads the pins that it finds
            checkpointer.load_into(target)

    return resume


OPERATIONS: Final[Mapping[str, Operation]] = {
    "first save": Operation(_saving(_one), first=True),
    "first load": Operation(_loading, _one, first=True),
    "save 1000 small arrays": Operation(_saving(_small)),
    "load 1000 small arrays": Operation(_loading, _small),
    "save one large array": Operation(_saving(_large)),
    "load one large array": Operation(_loading, _large),
    "open 1000 arrays": Operation(_opening, _small),
    "one slice": Operation(_slicing, _large),
    "metadata of 1000 arrays": Operation(_metadata, _small),
    "resume": Operation(_resuming, _large, run=True),
}


def trace(run: Callable[[], object]) -> Trace:
    """Run a function, and count the calls of functions of the core on this thread and on threads that it started."""
    import threading

    calls: dict[str, dict[str, int]] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(_CORE):
            return
        functions = calls.setdefault(code.co_filename.removeprefix(_CORE), {})
        if not code.co_name.startswith("<"):
            functions[code.co_qualname] = functions.get(code.co_qualname, 0) + 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls


def count(name: str, directory: Path) -> Counts:
    """Count an operation. The directory must be empty."""
    requests, nbytes = _at_a_store(OPERATIONS[name])
    calls, traced, memory = _in_a_process(name, directory)
    syncs = None if traced is None else sum(call in ("fsync", "fdatasync") for call in traced)
    return Counts(calls, None if traced is None else len(traced), syncs, requests, nbytes, memory)


def _context() -> Context:
    return ckptcore.Context(io=ckptcore.context.IOOptions(threads=1))


def _at_a_store(operation: Operation) -> tuple[int, int]:
    """Return the requests of an operation, and their bytes."""
    from ckptcore_testing.faults import FaultPlan
    from ckptcore_testing.faulty_storage import with_faults, with_storage

    from ckptcore.builtin.memory import MemoryStorages

    plan, stores = FaultPlan(), MemoryStorages()
    context = with_storage(_context(), "memory", lambda url, options: with_faults(stores.open(url, options), plan))
    operation.store("memory://counts", context)
    call = operation.call("memory://counts", lambda: context)
    before, nbytes = len(plan.operations), plan.bytes_read + plan.bytes_written
    call()
    return len(plan.operations) - before, plan.bytes_read + plan.bytes_written - nbytes


def _in_a_process(name: str, directory: Path) -> tuple[int, Sequence[str] | None, int | None]:
    """Return the calls, the names of the system calls and the memory of an operation in a process of its own."""
    import subprocess

    packages = packages_without_metadata(directory / "packages", "ckptcore", "tools")
    environment, log = environment_without_metadata(packages), directory / "strace"
    tracer = ["strace", "-f", "-q", "-e", "trace=%file,%desc", "-o", str(log)] if has_strace() else []

    def run(*before: str) -> str:
        location = directory / f"location-{len(before)}"
        location.mkdir()
        OPERATIONS[name].store(str(location), _context())
        command = [*before, sys.executable, "-S", "-m", "tools.counts", "--count", name, str(location)]
        ended = subprocess.run(command, env=environment, cwd=packages, stdout=subprocess.PIPE, text=True, check=True)
        return ended.stdout

    if tracer and OPERATIONS[name].first:
        run()  # modules that were not compiled yet are compiled now
    counted = json.loads(run(*tracer))
    return counted["calls"], _system_calls(log) if log.exists() else None, counted["memory"]


@functools.cache
def has_strace() -> bool:
    """Return whether strace can trace a process here."""
    import shutil
    import subprocess

    if shutil.which("strace") is None:
        return False
    return subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, check=False).returncode == 0


def _system_calls(log: Path) -> Sequence[str]:
    """Return the names of the calls between both marks, without those that map memory."""
    import re

    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    (begin,) = [number for number, line in enumerate(lines) if _BEGIN in line]
    (end,) = [number for number, line in enumerate(lines) if _END in line]
    names = [match[1] for line in lines[begin + 1 : end] if (match := re.match(r"\d+ +(\w+)\(", line))]
    return [name for name in names if name != "mmap"]


def _count_here(operation: Operation, location: str) -> None:
    """Count in this process, whose system calls strace counts."""
    call = operation.call(location, functools.cache(_context))
    if not operation.first:
        call()
    before = _peak(reset=True)
    os.access(_BEGIN, os.F_OK)
    calls = sum(sum(functions.values()) for functions in trace(call).values())
    os.access(_END, os.F_OK)
    after = _peak(reset=False)
    memory = None if before is None or after is None else (after - before) >> 10
    sys.stdout.write(json.dumps({"calls": calls, "memory": memory}))


def _peak(*, reset: bool) -> int | None:
    """Return the most memory that this process had, in KiB, since the last reset; None if Linux does not tell."""
    try:
        if reset:
            with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
                file.write("5")
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return None


def table(limits: Mapping[str, Counts]) -> str:
    """Return the lines of the limits in the test."""
    lines = []
    for name, numbers in limits.items():
        fields = ", ".join(f"{field}={number}" for field, number in numbers._asdict().items())
        lines.append(f'    "{name}": Counts({fields}),\n')
    return "".join(lines)


def main() -> int:
    """Print the numbers and the limits, or write new limits."""
    import argparse
    import tempfile

    parser = argparse.ArgumentParser(prog="python -m tools.counts", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write limits a little above the present numbers")
    parser.add_argument("--only", nargs="+", choices=OPERATIONS, default=list(OPERATIONS), help="count only these")
    options = parser.parse_args()
    from tests.architecture.test_counts import LIMITS

    found = {}
    print(f"{'operation':24} {'':8}" + "".join(f"{field:>14}" for field in Counts._fields))
    for name in options.only:
        with tempfile.TemporaryDirectory() as directory:
            found[name] = count(name, Path(directory))
        for what, numbers in (("now", found[name]), ("limit", LIMITS.get(name, ()))):
            print(f"{name:24} {what:8}" + "".join(f"{'-' if number is None else number:>14}" for number in numbers))
    if options.write:
        before, rest = TABLE.read_text(encoding="utf-8").split(_BEGIN_TABLE)
        limits = {**LIMITS, **{name: numbers.limits() for name, numbers in found.items()}}
        text = table({name: limits[name] for name in OPERATIONS if name in limits})
        TABLE.write_text(f"{before}{_BEGIN_TABLE}{text}{_END_TABLE}{rest.split(_END_TABLE)[1]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--count"]:
        _count_here(OPERATIONS[sys.argv[2]], sys.argv[3])
    else:
        sys.exit(main())
