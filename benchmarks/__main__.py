"""Run benchmarks and print a table: ``python -m benchmarks [--only NAME ...] [--out FILE [--chart]]``."""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import BENCHMARKS, BUDGET, SEPARATE
from benchmarks.report import Row, lines, write_report
from benchmarks.setting import Setting


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write a report; return 1 if a target was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    only = f"run only these (default: all but {', '.join(SEPARATE)})"
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BUDGET), help=only)
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of each case (default: 7)")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full sizes (default: 1)")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="where to write; a real disk, not tmpfs")
    parser.add_argument("--out", type=Path, help="write the results to this file, as JSON")
    parser.add_argument("--chart", action="store_true", help="draw the chart of the README from the results of --out")
    options = parser.parse_args(arguments)
    setting = Setting(options.directory, options.rounds, options.scale)
    sections: dict[str, list[Row]] = {}
    seconds: dict[str, float] = {}
    try:
        for name in options.only:
            start, sections[name] = time.monotonic(), []
            sections[name].extend(measure(name, setting))
            seconds[name] = time.monotonic() - start
            budget = f" of {BUDGET[name]}" if name in BUDGET else ""
            print(f"{name}: {len(sections[name])} rows, {seconds[name]:.0f} s{budget}", file=sys.stderr, flush=True)
            if options.out is not None:
                write_report(options.out, setting, sections, seconds, BUDGET)
    finally:  # what was measured is printed also after an error
        rows = [row for of_one in sections.values() for row in of_one]
        print("\n".join(lines(rows)))
        slow = [name for name, taken in seconds.items() if taken > BUDGET.get(name, taken)]
        over = f"; over budget: {', '.join(slow)}" if slow else ""
        print(f"{sum(seconds.values()):.0f} s{over}", file=sys.stderr)
    if options.chart:
        from benchmarks import chart  # imports every library that it shows

        chart.main(["--results", str(options.out)])
    missed = sum(not row.reached for row in rows)
    print(f"{missed} targets missed" if missed else "every target reached")
    return 1 if missed else 0


def measure(name: str, setting: Setting) -> Iterator[Row]:
    """Run a benchmark in a new directory below that of the setting, and remove the directory."""
    scratch = Path(tempfile.mkdtemp(prefix=".bench-", dir=setting.directory))
    try:
        yield from importlib.import_module(f"benchmarks.{name}").rows(Setting(scratch, setting.rounds, setting.scale))
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    sys.exit(main())
