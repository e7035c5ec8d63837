"""Fuzz the readers of every kind of file with atheris: ``python -m tests.fuzzing [--seconds 600] [TARGET]...``.

Each target runs in a separate process, because libFuzzer ends its process, and native code may abort it. The process is
forked from this one, which has imported and instrumented the library. After an unexpected Python error, fuzzing
continues: the first input of each kind is stored with the seeds, in ``tests/fuzzing/corpus/TARGET/crash-*``. Inputs
that reach new code are kept in ``build/fuzz``; ``--minimize`` stores a few of them with the seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import atheris

_PACKAGES: Final = [
    "ckptcore", "ckptcore_dcp", "ckptcore_formats", "ckptcore_incremental", "ckptcore_integrations", "ckptcore_orbax",
    "ckptcore_tools", "ckptcore_view",
]  # fmt: skip
"""The instrumented packages, without tests and the conformance tests."""

_INSTRUMENTED: Final = atheris.instrument_imports(include=_PACKAGES)
_INSTRUMENTED.__enter__()  # until the process ends, because modules are also imported at first use

with contextlib.redirect_stderr(io.StringIO()):  # atheris writes a line for each module
    from tests.fuzzing.checks import CORPUS, Checker, Observer
    from tests.fuzzing.mutations import MUTATORS
    from tests.fuzzing.targets import TARGETS

_WORK: Final = Path("build/fuzz")
_PART: Final = "--part"
"""First argument of a process that libFuzzer starts. The target and arguments of libFuzzer follow it."""

_ADDRESS_BYTES: Final = 4 << 30
"""Address space that a process may map in addition to that in use after reading the samples."""

_MAX_INPUT_BYTES: Final = 1 << 16
_FRESH: Final = 0.2
"""Fraction of mutations that start from an intact file."""

_STRUCTURED: Final = 0.75
"""Fraction of mutations that follow the structure of the file."""

_HANG_SECONDS: Final = 60
_KEPT_BYTES: Final = 24 << 10
_KEPT_FILES: Final = 40
"""Inputs of a target that `--minimize` keeps, in addition to those that once did harm."""


class _Row(NamedTuple):
    """The result of fuzzing a target."""

    executions: int
    coverage: int
    new_coverage: int
    crashes: Sequence[str]


class _Crashes:
    """The directory of harmful inputs, with one input for each kind of harm."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._kinds: set[object] = set()

    def store(self, data: bytes, error: BaseException) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "/ckptcore" in frame.filename and "/tests/" not in frame.filename]
        kind = type(error), *[(frame.filename, frame.lineno) for frame in ours[-1:]]
        if kind in self._kinds:
            return
        self._kinds.add(kind)
        path = self._directory / f"crash-{hashlib.sha1(data).hexdigest()[:12]}"
        path.write_bytes(data)
        print(f"CRASH {path}", file=sys.stderr)
        traceback.print_exception(error)


def _run(name: str, arguments: Sequence[str]) -> None:
    """Fuzz a target, or run another task of libFuzzer's arguments, and end the process."""
    directory = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    print(f"DIRECTORY {directory}", file=sys.stderr, flush=True)
    checker = Checker(TARGETS[name], directory / "places", Observer())
    crashes = _Crashes(CORPUS / name)

    def test_one_input(data: bytes) -> None:
        try:
            checker.check_quickly(data)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  # every unexpected error is a finding
            crashes.store(data, error)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        choices = random.Random(seed)
        # libFuzzer drops samples that reach no new code, even if mutations of them would.
        if choices.random() < _FRESH:
            data = choices.choice(samples)
        if data and choices.random() < _STRUCTURED:
            changed = MUTATORS[checker.place_of(data).mutator](data[1:], choices)
            if changed is not None and len(changed) < max_size:
                return data[:1] + changed
        return bytes(atheris.Mutate(data, max_size))

    samples = checker.samples()
    (directory / "samples").mkdir()
    for number, sample in enumerate(samples):
        (directory / "samples" / str(number)).write_bytes(sample)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit, hard = mapped + _ADDRESS_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    # With -merge=1, libFuzzer starts this program for parts of the work.
    program = f"{sys.executable} -m tests.fuzzing {_PART} {name}"
    options = [f"-max_len={_MAX_INPUT_BYTES}", f"-timeout={_HANG_SECONDS}", "-rss_limit_mb=4096"]
    prefix = f"-artifact_prefix={CORPUS / name}/crash-native-"
    atheris.Setup(
        [program, *options, prefix, *arguments, str(directory / "samples")], test_one_input, custom_mutator=mutate
    )
    atheris.Fuzz()


def _fork(name: str, arguments: Sequence[str], log: Path) -> str:
    """Run `_run` in a forked process. Return its output."""
    pid = os.fork()
    if pid == 0:
        try:
            with log.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            _run(name, arguments)
        except BaseException:  # noqa: BLE001  # the process must not return into the program of its parent
            traceback.print_exc()
        finally:
            os._exit(1)
    os.waitpid(pid, 0)
    text = log.read_text("utf-8", "replace")
    for line in re.findall(r"^DIRECTORY (.*)$", text, re.MULTILINE):
        shutil.rmtree(line, ignore_errors=True)
    return text


def _fuzz(name: str, seconds: float) -> _Row:
    """Fuzz a target for a time. Stops earlier if native code aborts or hangs, which must be fixed first."""
    kept = _WORK / name
    kept.mkdir(parents=True, exist_ok=True)
    (CORPUS / name).mkdir(parents=True, exist_ok=True)
    limit = f"-max_total_time={max(1, round(seconds))}"
    arguments = [limit, "-print_final_stats=1", str(kept), str(CORPUS / name)]
    text = _fork(name, arguments, _WORK / f"{name}.log")
    executed = re.search(r"^stat::number_of_executed_units: (\d+)", text, re.MULTILINE)
    if executed is None:
        raise SystemExit(f"{name} could not be fuzzed:\n{text[-4000:]}")
    coverages = [int(number) for number in re.findall(r" cov: (\d+)", text)] or [0]
    crashes = re.findall(r"(?:^CRASH|Test unit written to) (.*)$", text, re.MULTILINE)
    return _Row(int(executed[1]), max(coverages), max(coverages) - coverages[0], crashes)


def _minimize(name: str) -> None:
    """Replace the seeds of a target by the smallest inputs that reach the same code as the seeds and `_WORK`."""
    with tempfile.TemporaryDirectory() as merged:
        _fork(name, ["-merge=1", merged, str(CORPUS / name), str(_WORK / name)], _WORK / f"{name}.merge.log")
        smallest = sorted(Path(merged).iterdir(), key=lambda path: (path.stat().st_size, path.name))
        if not smallest:
            raise SystemExit(f"the seeds of {name} could not be merged: see {_WORK / name}.merge.log")
        for seed in (CORPUS / name).iterdir():
            if not seed.name.startswith("crash-"):
                seed.unlink()
        total = 0
        for path in smallest[:_KEPT_FILES]:
            total += path.stat().st_size
            if total <= _KEPT_BYTES:
                shutil.copyfile(path, CORPUS / name / path.name[:12])


def main() -> None:
    """Fuzz the targets, and print a table."""
    if sys.argv[1:2] == [_PART]:
        _run(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing", description="Fuzz the readers of ckptcore.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"what to fuzz: {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=float, default=600, help="time for all targets together (600)")
    parser.add_argument("--minimize", action="store_true", help="store what reaches new code with the seeds")
    options = parser.parse_args()
    names = options.targets or list(TARGETS)
    if unknown := set(names) - set(TARGETS):
        parser.error(f"unknown targets: {', '.join(sorted(unknown))}")
    _WORK.mkdir(parents=True, exist_ok=True)
    print(f"{'target':20} {'executions':>10} {'coverage':>9} {'new':>6} {'crashes':>8}", flush=True)
    rows = []
    for name in names:
        row = _fuzz(name, options.seconds / len(names))
        rows.append(row)
        print(f"{name:20} {row.executions:10} {row.coverage:9} {row.new_coverage:6} {len(row.crashes):8}", flush=True)
        for crash in row.crashes:
            print(f"    {crash}: see {_WORK / name}.log", flush=True)
        if options.minimize:
            _minimize(name)
    print(f"{'all':20} {sum(row.executions for row in rows):10}")
    if any(row.crashes for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
