"""Runs every benchmark and prints a table: ``python -m benchmarks [--rounds 7] [--gigabytes 1.5] [--directory DIR]``."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.broadcast import rows as broadcast_rows
from benchmarks.cases import Case, async_cases, large_cases, measure, small_cases
from benchmarks.dcp import dcp_large_cases, dcp_small_cases
from benchmarks.dcp_reshard import rows as dcp_reshard_rows
from benchmarks.jobs import rows as job_rows
from benchmarks.object_stores import rows as object_store_rows
from benchmarks.orbax import jax_state, orbax_blocking_rows, orbax_large_cases, orbax_peak_rows, orbax_small_cases
from benchmarks.processes import process_cases
from benchmarks.quantised import QUANTISED_GIGABYTES, quantised_cases
from benchmarks.resharding import rows as resharding_rows
from benchmarks.scale import rows as scale_rows
from benchmarks.slices import rows as slice_rows
from benchmarks.stall import stall_rows
from benchmarks.states import large_state, small_state


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of each case")
    parser.add_argument("--gigabytes", type=float, default=1.5, help="size of the large state")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="where to write; a real disk, not tmpfs")
    parser.add_argument("--only", default="", help="only cases whose name has this in it")
    options = parser.parse_args(arguments)
    missed = 0
    scratch = Path(tempfile.mkdtemp(prefix=".bench-", dir=options.directory))
    try:
        print(f"{'case':42} {'contender':36} {'median':>10} {'ratio':>7}  target")
        if options.only in "small":
            state = small_state()
            for case in small_cases(scratch, state):
                missed += report(case, options.rounds * 3, 0.0)
        alone: dict[str, Callable[[], Iterator[tuple[str, bool]]]] = {
            "stall": lambda: stall_rows(scratch, options.rounds),
            "reshard": lambda: dcp_reshard_rows(scratch),
            "jobs": lambda: job_rows(scratch),
            "slices": lambda: slice_rows(scratch, options.rounds),
            "broadcast": lambda: broadcast_rows(scratch),
            "scale": lambda: scale_rows(scratch),
            "object_stores": lambda: object_store_rows(scratch, min(options.gigabytes, 1.0)),
        }
        for name, rows in alone.items():
            if options.only in name:
                for line, ok in rows():
                    missed += not ok
                    print(line, flush=True)
                if options.only:
                    return 1 if missed else 0
        if options.only in "quantised":
            for case in quantised_cases(scratch):
                missed += report(case, options.rounds, QUANTISED_GIGABYTES)
            if options.only:
                return 1 if missed else 0
        if options.only in "orbax":
            missed += orbax(scratch, options.rounds, options.gigabytes)
            if options.only:
                return 1 if missed else 0
        if options.only in "dcp":
            for case in dcp_small_cases(scratch, small_state()):
                missed += report(case, options.rounds, 0.0)
        state = large_state(options.gigabytes)
        size = sum(tensor.nbytes for tensor in state.values()) / 1e9
        if options.only in "dcp":
            for case in dcp_large_cases(scratch, state):
                missed += report(case, options.rounds, size)
            if options.only:
                return 1 if missed else 0
        for case in [*large_cases(scratch, state), *async_cases(scratch, state)]:
            if options.only in case.name:
                missed += report(case, options.rounds, size)
        del state
        for line, ok in process_cases(scratch, options.gigabytes):
            missed += not ok
            print(line, flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"{missed} targets missed" if missed else "every target reached")
    return 1 if missed else 0


def orbax(scratch: Path, rounds: int, gigabytes: float) -> int:
    """Measure the layout ocdbt beside Orbax and print; how many targets are missed."""
    missed = 0
    small = jax_state(small_state())
    for case in orbax_small_cases(scratch, small):
        missed += report(case, rounds, 0.0)
    lines = list(orbax_blocking_rows(scratch, small, "orbax: save_async of 1000 small blocks", rounds))
    large = jax_state(large_state(gigabytes))
    lines += orbax_blocking_rows(scratch, large, "orbax: save_async blocks", rounds)
    size = sum(array.nbytes for array in large.values()) / 1e9
    for case in orbax_large_cases(scratch, large):
        missed += report(case, rounds, size)
    del large
    for line, ok in [*lines, *orbax_peak_rows(scratch, gigabytes), *resharding_rows()]:
        missed += not ok
        print(line, flush=True)
    return missed


def report(case: Case, rounds: int, gigabytes: float) -> int:
    """Measure a case and print its rows; 1 if its target is missed."""
    measured = measure(case, rounds, int(gigabytes * 1e9))
    missed = 0
    for number, outcome in enumerate(measured.outcomes):
        speed = f"{gigabytes / outcome.median:7.2f} GB/s" if gigabytes else f"{outcome.median * 1e3:7.2f} ms"
        verdict = ""
        if number == 1 and case.target is not None:
            reached = outcome.ratio >= case.target
            missed += not reached
            verdict = f"{case.target:.2f} {'reached' if reached else 'MISSED'}"
        print(f"{case.name:42} {outcome.name:36} {speed:>10} {outcome.ratio:7.2f}  {verdict}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
