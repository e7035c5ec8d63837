"""Compare the benchmarks with those of an older commit: ``python -m benchmarks.compare COMMIT [--only NAME ...]``.

The commit is checked out into a worktree for the time of the comparison. `old` may also be the directory of an existing
worktree.

Three processes run each benchmark: one of the old worktree, one of the new, and a second one of the old. In each round
each of them runs the same contender once, and each round begins with another process. The ratio of new to old contains
the changes of the code and the noise of the machine; the ratio of old to old contains only the noise. Both ratios are
computed for each round, and the first round does not count. A run of less than 50 ms is repeated within its round, and
the median counts. The processes are started several times, because the layout of memory and other accidents of a
process last as long as the process.

Each worktree runs its own benchmarks with its own library, and the Python of its ``.venv`` if it has one. Rows are
matched by name. Other libraries, which are the same in both, are not timed. A benchmark that measures only in jobs of
its own gives one measurement of a row for each start, so it is started once for each pair.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from benchmarks import BENCHMARKS, BUDGET

_ROOT: Final = Path(__file__).resolve().parents[1]
_MOST: Final = 1.05
"""Limit of new divided by old for times and bytes, unless the noise is larger. Counts must not grow."""

_MOST_READ: Final = 1.01
_READ_SLACK: Final = 4096
"""Bytes that a run may read more than before: metadata may change by a few bytes."""

_ROUND_SECONDS: Final = 0.05
_MOST_REPEATS: Final = 10
"""Maximum number of repeats of a short run within a round. Their median counts."""

_HEAD: Final = f"{'case':44} {'contender':38} {'old':>11} {'new':>11} {'new/old':>8} {'old/old':>8} {'read':>6}"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a comparison.

    Attributes:
        old: the worktree before.
        new: the worktree after.
        directory: a directory on the file system that is measured.
        pairs: total rounds of each row, over all launches.
        launches: number of starts of the processes of each benchmark; the pairs are divided among them.
        scale: share of the full sizes. The three processes hold their states at the same time.
    """

    old: Path
    new: Path
    directory: Path
    pairs: int = 15
    launches: int = 3
    scale: float = 0.25


@dataclass(slots=True)
class RowSamples:
    """Measurements of a row, one number for each round: of the old worktree, the new one, and the old one again."""

    unit: str = "s"
    old: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    old_read: list[float] = field(default_factory=list)
    new_read: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A row of the report.

    Attributes:
        case: what was measured.
        contender: the operation of ckptcore.
        unit: ``s``, ``B``, or the name of what is counted.
        pairs: number of rounds.
        old: median of the old worktree, in `unit`.
        new: median of the new worktree.
        ratio: median over the rounds of new divided by old.
        spread: upper quartile of the ratios of old to old, in both directions. Its difference from 1 is the noise.
        read: bytes read by new divided by bytes read by old; None if they were not counted.
        passed: False if the ratio is above both the limit and the spread, if a count grew, or if the new worktree reads
            more.
    """

    case: str
    contender: str
    unit: str
    pairs: int
    old: float
    new: float
    ratio: float
    spread: float
    read: float | None
    passed: bool

    def line(self) -> str:
        """Return the row of the table."""
        read = "" if self.read is None else f"{self.read:.2f}"
        amounts = f"{_amount(self.old, self.unit):>11} {_amount(self.new, self.unit):>11}"
        numbers = f"{self.ratio:8.3f} {self.spread:8.3f} {read:>6}"
        return f"{self.case:44} {self.contender:38} {amounts} {numbers}  {'' if self.passed else 'WORSE'}".rstrip()


def spread(old: Sequence[float], again: Sequence[float]) -> float:
    """Return the upper quartile of the ratios of two measurements of the same thing, in both directions."""
    ratios = [second / first for first, second in zip(old, again, strict=True) if first and second]
    if not ratios:
        return 1.0
    both = [*ratios, *[1 / ratio for ratio in ratios]]
    return statistics.quantiles(both, n=4, method="inclusive")[2]


def summarise(case: str, contender: str, samples: RowSamples) -> Comparison:
    """Compare the measurements of a row."""
    ratios = [new / old if old else float(new > 0) + 1 for old, new in zip(samples.old, samples.new, strict=True)]
    ratio = statistics.median(ratios)
    noise = spread(samples.old, samples.again)
    timed = samples.unit in ("s", "B")
    passed = ratio <= (max(_MOST, noise) if timed else 1.0)
    read = None
    if samples.old_read and any(samples.old_read):
        old_read, new_read = statistics.median(samples.old_read), statistics.median(samples.new_read)
        read = new_read / old_read if old_read else 1.0
        passed = passed and new_read <= old_read * _MOST_READ + _READ_SLACK
    old, new = statistics.median(samples.old), statistics.median(samples.new)
    return Comparison(case, contender, samples.unit, len(ratios), old, new, ratio, noise, read, passed)


def _amount(value: float, unit: str) -> str:
    if unit == "s":
        for factor, name in ((1.0, "s"), (1e3, "ms")):
            if value * factor >= 1:
                return f"{value * factor:.2f} {name}"
        return f"{value * 1e6:.1f} us"
    return f"{value / 2**20:.1f} MiB" if unit == "B" else f"{value:g} {unit}"


class _Process:
    """A worker process of a worktree, which runs one benchmark."""

    def __init__(self, tree: Path, benchmark: str, options: Options, rounds: int, cases: Sequence[str] | None) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix=".bench-", dir=options.directory))
        self._errors = tempfile.TemporaryFile("w+b")  # noqa: SIM115  # open for as long as the process
        self._process = subprocess.Popen(
            [_python_of(tree), "-P", str(Path(__file__).with_name("compare_worker.py")), str(tree)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=tree,
            env=_environment(tree),
        )
        self._name = f"{benchmark} of {tree}"
        self._begin = {
            "benchmark": benchmark,
            "directory": str(self._scratch),
            "rounds": rounds,
            "scale": options.scale,
            "cases": cases,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()
        shutil.rmtree(self._scratch)

    def begin(self) -> Mapping[str, Any]:
        """Run until the first case or the end."""
        return self._ask(self._begin)

    def run(self, contender: int, repeats: int) -> Mapping[str, Any]:
        """Run a contender of the present case, and return medians of the repeats."""
        return self._ask({"run": contender, "repeats": repeats})

    def advance(self) -> Mapping[str, Any]:
        """Run until the next case or the end."""
        return self._ask({"next": True})

    def _ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            self._errors.seek(0)
            error = self._errors.read().decode(errors="replace")[-4000:]
            raise RuntimeError(f"{self._name} failed: {error}")
        reply: Mapping[str, Any] = json.loads(line)
        return reply


def _python_of(tree: Path) -> str:
    own = tree / ".venv" / "bin" / "python"
    return str(own if own.exists() else sys.executable)


def _environment(tree: Path) -> Mapping[str, str]:
    sources = [tree, *sorted((tree / "plugins").glob("*/src"))]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**environment, "PYTHONPATH": os.pathsep.join(map(str, sources))}


@contextmanager
def worktree_of(old: str, new: Path, directory: Path) -> Iterator[Path]:
    """Return a worktree of a commit, which is removed afterwards. Return a directory as it is.

    Args:
        old: the commit, or the directory.
        new: a worktree of the repository that has the commit.
        directory: where to make the worktree.
    """
    if Path(old).is_dir():
        yield Path(old).resolve()
        return
    git = partial(subprocess.run, cwd=new, check=True)
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=directory) as scratch:
        tree = Path(scratch) / "old"
        git(["git", "worktree", "add", "--quiet", "--detach", tree, old])
        try:
            yield tree
        finally:
            git(["git", "worktree", "remove", "--force", tree])


def compare_trees(benchmark: str, options: Options) -> Iterator[Comparison | str]:
    """Compare one benchmark of two worktrees. Return rows, and what only one worktree has: rows, or the benchmark.

    Raises:
        RuntimeError: the benchmark failed in one of them.
    """
    if not (options.old / "benchmarks" / f"{benchmark}.py").exists():
        yield "only in the new worktree"
        return
    old, new = (_listed(tree, benchmark, options) for tree in (options.old, options.new))
    cases = _cases_of_both(list(old["cases"]), list(new["cases"]))
    launches = min(options.launches, options.pairs) if cases else options.pairs
    samples: dict[tuple[str, str], RowSamples] = {}
    for launch in range(launches):
        rounds = len(range(launch, options.pairs, launches))
        _measure(benchmark, options, cases, rounds, samples, first=launch)
    for (case, contender), of_row in samples.items():
        yield summarise(case, contender, of_row)
    rows = [_names(of_tree) for of_tree in (old, new)]
    for own, other, name in ((rows[0], rows[1], "old"), (rows[1], rows[0], "new")):
        for case, contender in own:
            if (case, contender) not in other or (case, contender) not in samples:
                yield f"only in the {name} worktree: {case}, {contender}"


def _listed(tree: Path, benchmark: str, options: Options) -> Mapping[str, Any]:
    with _Process(tree, benchmark, options, 1, None) as process:
        return process.begin()


def _cases_of_both(old: Sequence[str], new: Sequence[str]) -> Sequence[str]:
    """Return the cases that both worktrees run, in an order that both have."""
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    return [old[block.a + number] for block in blocks for number in range(block.size)]


def _names(listed: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    timed = [(case, contender) for case, contenders in listed["cases"].items() for contender in contenders]
    return [*timed, *[(row["case"], row["contender"]) for row in listed["rows"]]]


def _measure(
    benchmark: str,
    options: Options,
    cases: Sequence[str],
    rounds: int,
    samples: dict[tuple[str, str], RowSamples],
    *,
    first: int,
) -> None:
    """Start the three processes, and add their measurements to `samples`."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(_Process(tree, benchmark, options, 1, cases))
            for tree in (options.old, options.new, options.old)
        ]
        replies = _in_turn(processes, first, _Process.begin)
        while "case" in replies[0]:
            case = replies[0]["case"]
            assert all(reply["case"] == case for reply in replies)
            for contender in replies[0]["contenders"]:
                if contender in replies[1]["contenders"]:
                    numbers = [reply["contenders"].index(contender) for reply in replies]
                    _rounds(processes, numbers, rounds, samples.setdefault((case, contender), RowSamples()))
            replies = _in_turn(processes, first, _Process.advance)
        _add_rows([reply["rows"] for reply in replies], samples)


def _in_turn(
    processes: Sequence[_Process], first: int, ask: Callable[[_Process], Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Send a request to one process after the other, beginning with number `first` modulo their number."""
    replies: dict[int, Mapping[str, Any]] = {}
    for number in range(len(processes)):
        index = (first + number) % len(processes)
        replies[index] = ask(processes[index])
    return [replies[index] for index in range(len(processes))]


def _rounds(processes: Sequence[_Process], numbers: Sequence[int], rounds: int, into: RowSamples) -> None:
    contenders = dict(zip(processes, numbers, strict=True))
    repeats = 1
    for turn in range(-1, rounds):
        run = partial(_run, contenders, repeats)
        old, new, again = _in_turn(processes, turn, run)
        if turn < 0:
            repeats = min(_MOST_REPEATS, max(1, int(_ROUND_SECONDS / old["seconds"])))
            continue
        into.old.append(old["seconds"])
        into.new.append(new["seconds"])
        into.again.append(again["seconds"])
        into.old_read.append(old["nbytes_read"])
        into.new_read.append(new["nbytes_read"])


def _run(contenders: Mapping[_Process, int], repeats: int, process: _Process) -> Mapping[str, Any]:
    return process.run(contenders[process], repeats)


def _add_rows(rows: Sequence[Sequence[Mapping[str, Any]]], samples: dict[tuple[str, str], RowSamples]) -> None:
    """Add the rows that benchmarks measured themselves."""
    old, new, again = [{(row["case"], row["contender"]): row for row in of_one} for of_one in rows]
    for name, row in old.items():
        if name in new and name in again:
            into = samples.setdefault(name, RowSamples(row["unit"]))
            into.old.append(row["median"])
            into.new.append(new[name]["median"])
            into.again.append(again[name]["median"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print and write a report; return 1 if a row is worse or a benchmark failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", help="the commit to compare with, or a worktree of it")
    parser.add_argument("--new", type=Path, default=_ROOT, help="the worktree to measure (default: this one)")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=tuple(BUDGET), help="run only these")
    parser.add_argument("--pairs", type=int, default=15, help="rounds of each row (default: 15)")
    parser.add_argument("--launches", type=int, default=3, help="starts of the processes (default: 3)")
    parser.add_argument("--scale", type=float, default=0.25, help="share of the full sizes (default: 0.25)")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="where to write; a real disk, not tmpfs")
    parser.add_argument("--out", type=Path, help="write the results to this file, as JSON")
    given = parser.parse_args(arguments)
    new, directory = given.new.resolve(), given.directory.resolve()
    find = ["git", "rev-parse", "--verify", "--quiet", f"{given.old}^{{commit}}"]
    if (
        not Path(given.old).is_dir()
        and subprocess.run(find, cwd=new, stdout=subprocess.DEVNULL, check=False).returncode
    ):
        parser.error(f"old: {given.old!r} is neither a commit in {new} nor a directory")
    with worktree_of(given.old, new, directory) as old:
        options = Options(old, new, directory, given.pairs, given.launches, given.scale)
        return _compare(options, given.only, given.out)


def _compare(options: Options, benchmarks: Sequence[str], out: Path | None) -> int:
    print(_HEAD)
    by_setting: dict[str, list[Comparison]] = {}
    notes: list[str] = []
    failed = 0
    for name in benchmarks:
        by_setting[name] = []
        try:
            for row in compare_trees(name, options):
                if isinstance(row, Comparison):
                    print(row.line(), flush=True)
                    by_setting[name].append(row)
                else:
                    notes.append(f"{name}: {row}")
        except RuntimeError as error:
            failed += 1
            notes.append(str(error))
        if out is not None:
            report = {
                "options": {key: str(value) for key, value in asdict(options).items()},
                "benchmarks": {key: [asdict(row) for row in rows] for key, rows in by_setting.items()},
                "notes": notes,
            }
            out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    worse = [row.line() for rows in by_setting.values() for row in rows if not row.passed]
    print(*notes, f"{len(worse)} rows are worse, {failed} benchmarks failed", *worse, sep="\n")
    return 1 if worse or failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # otherwise the worktree would remain
    sys.exit(main())
