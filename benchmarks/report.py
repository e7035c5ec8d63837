"""The rows of a report, as a table for people and as JSON for charts."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from benchmarks.setting import Setting

TABLE_HEAD: Final = f"{'case':44} {'contender':38} {'median':>11} {'ratio':>7} {'spread':>6}"
"""The header of the table. `Row.line` returns its rows."""

_DISTRIBUTIONS: Final = (
    "ckptcore", "numpy", "torch", "jax", "safetensors", "orbax-checkpoint", "tensorstore", "transformers", "obstore",
    "s3fs", "gcsfs",
)  # fmt: skip


_NO_PEERS: Final = (
    "ckptcore", "replacement", "raw ", "memcpy", "memory copy", "copy, hash", "hash and write", "pinned", "pageable",
    "staged", "a TCP socket", "no saves", "XXH3", "SHA",
)  # fmt: skip
"""Beginnings of the names of contenders that are ours, or limits of the machine. All others are peers."""


@dataclass(frozen=True, slots=True)
class PageCache:
    """The memory of the system before a run that writes, in bytes, from ``/proc/meminfo``.

    Attributes:
        free: memory that is not used. A write to the page cache is slow if the host must provide the memory first.
        cached: memory of the page cache.
        dirty: memory of the page cache that is not on the disk yet.
    """

    free: int
    cached: int
    dirty: int

    @classmethod
    def now(cls) -> PageCache:
        """Read the present state; zeros if the system does not report it."""
        memory = {"MemFree": 0, "Cached": 0, "Dirty": 0}
        path = Path("/proc/meminfo")
        for line in path.read_text(encoding="ascii").splitlines() if path.exists() else ():
            name, _, value = line.partition(":")
            if name in memory:
                memory[name] = int(value.split()[0]) << 10
        return cls(memory["MemFree"], memory["Cached"], memory["Dirty"])

    def __str__(self) -> str:
        return f"free {self.free / 1e9:.1f} GB, cached {self.cached / 1e9:.1f} GB, dirty {self.dirty / 1e6:.0f} MB"


@dataclass(frozen=True, slots=True)
class Row:
    """One measured number.

    Attributes:
        case: what was measured.
        contender: the measured alternative, such as ``dcp.save``.
        median: the median of the rounds, in `unit`.
        unit: ``s``, ``B``, or the name of what is counted.
        ratio: median over the rounds of the contender's time divided by ckptcore's. Above 1, ckptcore is faster.
        spread: interquartile range of the rounds divided by their median.
        cpu: median of the processor time of this process, in seconds.
        nbytes: bytes that one run moves, for the speed in `line`; 0 if no speed is shown.
        target: the required limit as text; empty if there is none.
        reached: False if the target was missed.
        page_cache: state before a run that writes, as medians over the rounds; None if not recorded.
        note: other findings.
    """

    case: str
    contender: str
    median: float
    unit: str = "s"
    ratio: float | None = None
    spread: float | None = None
    cpu: float | None = None
    nbytes: int = 0
    target: str = ""
    reached: bool = True
    page_cache: PageCache | None = None
    note: str = ""

    @property
    def is_of_a_peer(self) -> bool:
        """True if the contender is another library: neither ours, nor a limit of the machine."""
        return not self.contender.startswith(_NO_PEERS)

    @property
    def is_ahead_of_us(self) -> bool:
        """True if this is the row of a peer that is faster than ckptcore."""
        return self.ratio is not None and self.ratio < 1 and self.is_of_a_peer

    def amount(self) -> str:
        """Return the median with its unit."""
        return _amount(self.median, self.unit)

    def line(self) -> str:
        """Return the row of the table."""
        ratio = "" if self.ratio is None else f"{self.ratio:.3g}"
        spread = "" if self.spread is None else f"{self.spread:.0%}"
        verdict = f"{self.target}: {'reached' if self.reached else 'MISSED'}" if self.target else ""
        speed = f"{self.nbytes / self.median / 1e9:.2f} GB/s" if self.nbytes and self.unit == "s" else ""
        remarks = [verdict, speed, self.note, str(self.page_cache or "")]
        numbers = f"{self.amount():>11} {ratio:>7} {spread:>6}"
        return f"{self.case:44} {self.contender:38} {numbers}  {'; '.join(filter(None, remarks))}".rstrip()


def lines(rows: Sequence[Row]) -> Sequence[str]:
    """Return the table: first the peers that are ahead, the farthest first, then all rows in their order."""
    ahead = sorted([row for row in rows if row.is_ahead_of_us], key=lambda row: row.ratio or 0.0)
    first = ["ahead of ckptcore:", *[row.line() for row in ahead]] if ahead else ["no peer is ahead of ckptcore"]
    return [TABLE_HEAD, *first, "all rows:", *[row.line() for row in rows]]


def _amount(value: float, unit: str) -> str:
    if unit == "s":
        for factor, name in ((1.0, "s"), (1e3, "ms")):
            if value * factor >= 1:
                return f"{value * factor:.2f} {name}"
        return f"{value * 1e6:.1f} us"
    if unit == "B":
        return f"{value / 2**20:.1f} MiB"
    return f"{value:g} {unit}"


def write_report(
    path: Path,
    setting: Setting,
    rows: Mapping[str, Sequence[Row]],
    seconds: Mapping[str, float],
    budget: Mapping[str, float],
    device: str = "",
) -> None:
    """Write a report as JSON: the machine, the versions, the setting, and the rows and the time of each benchmark.

    Args:
        path: the file.
        setting: the setting of the run.
        rows: the rows of each benchmark.
        seconds: the time that each benchmark took.
        budget: the time that each may take.
        device: the name of the device, if one is measured.
    """
    report = {
        "machine": {**_machine(setting.directory), **({"device": device} if device else {})},
        "versions": {"python": platform.python_version(), **_versions()},
        "setting": {"rounds": setting.rounds, "scale": setting.scale},
        "seconds": {name: round(taken, 1) for name, taken in seconds.items()},
        "budget": {name: budget[name] for name in seconds if name in budget},
        "benchmarks": {name: [asdict(row) for row in of_one] for name, of_one in rows.items()},
    }
    path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _machine(directory: Path) -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "file_system": _file_system(directory),
    }


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(directory: Path) -> str:
    """Return the type of the file system with the longest mount point that contains a directory."""
    path, best = Path("/proc/mounts"), ("", "unknown")
    here = directory.resolve()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        _, mounted, kind, *_ = line.split(" ")
        if here.is_relative_to(mounted) and len(mounted) >= len(best[0]):
            best = mounted, kind
    return best[1]


def _versions() -> dict[str, str]:
    names = {distribution.metadata["Name"] for distribution in metadata.distributions()}
    plugins = sorted(name for name in names if name and name.startswith("ckptcore-"))
    return {name: metadata.version(name) for name in (*_DISTRIBUTIONS, *plugins) if name in names}
