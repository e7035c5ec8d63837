"""The benchmark of what copies cost runs."""

from __future__ import annotations

from pathlib import Path

from benchmarks.saved_bytes import rows


def test_the_benchmark_of_copies_runs(tmp_path: Path) -> None:
    lines = list(rows(tmp_path, nbytes=1 << 22, rounds=1))
    assert [line.split("  ")[0] for line in lines] == ["save, page cache"] * 3 + [
        "save_async, jax on the CPU, blocked"
    ] * 2
