"""Test time by file, from the JUnit files that pytest writes.

    python -m pytest -p tools.durations --junitxml=durations.xml ...
    python -m tools.durations durations.xml [more.xml ...]

As a plugin of pytest, this module adds the CPU seconds of each test to the JUnit file. A busy machine changes them less
than the time that passes. They are the CPU seconds of the test process and of child processes; those of a child process
count for the test during which the child ends and is waited for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

import pytest

_BEGIN = pytest.StashKey[float]()


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Record when a test begins."""
    item.stash[_BEGIN] = _cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the CPU seconds to the last report of a test, from which they reach the JUnit file."""
    report = yield
    if call.when == "teardown":
        report.user_properties.append(("cpu", f"{_cpu_seconds() - item.stash[_BEGIN]:.3f}"))
    return report


@dataclass(slots=True)
class FileTime:
    """Time of the tests of a file in seconds, and the test with the most CPU time."""

    tests: int = 0
    wall: float = 0.0
    cpu: float = 0.0
    longest: float = 0.0
    longest_test: str = ""


def read(paths: Sequence[str]) -> dict[str, FileTime]:
    """Return the times by module. Tests in a class count for its module; a name without a test module is kept."""
    files: dict[str, FileTime] = {}
    for path in paths:
        for case in ElementTree.parse(path).iter("testcase"):
            module = case.get("classname", "")
            while module and not module.rpartition(".")[2].startswith("test_"):
                module = module.rpartition(".")[0]
            cpu = sum(float(entry.get("value", "0")) for entry in case.iterfind("properties/property[@name='cpu']"))
            time = files.setdefault(module or case.get("classname", ""), FileTime())
            time.tests += 1
            time.wall += float(case.get("time", "0"))
            time.cpu += cpu
            if cpu >= time.longest:
                time.longest, time.longest_test = cpu, case.get("name", "")
    return files


def main(arguments: Sequence[str]) -> None:
    """Print the files by CPU seconds, then the sums by directory."""
    files = read(arguments)
    directories: dict[str, FileTime] = {}
    for module, time in files.items():
        place = directories.setdefault(module.rpartition(".")[0], FileTime())
        place.tests, place.wall, place.cpu = place.tests + time.tests, place.wall + time.wall, place.cpu + time.cpu
    for title, rows in (("file", files), ("directory", directories)):
        print(f"{'tests':>7} {'wall s':>8} {'cpu s':>8}  {title}")
        for name, time in sorted(rows.items(), key=lambda row: -row[1].cpu):
            longest = f"  ({time.longest:.1f} s: {time.longest_test[:60]})" if time.longest > 1 else ""
            print(f"{time.tests:7} {time.wall:8.1f} {time.cpu:8.1f}  {name}{longest}")
    print(f"{sum(t.tests for t in files.values()):7} {sum(t.wall for t in files.values()):8.1f}", end=" ")
    print(f"{sum(t.cpu for t in files.values()):8.1f}  all")


if __name__ == "__main__":
    main(sys.argv[1:])
