"""Saves and loads of a million Python numbers, as in the state of a data loader, compared with torch.save."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

import ckptcore
from benchmarks.alternating import Case, Contender, compare
from benchmarks.report import Row
from benchmarks.setting import Setting

_FAST: Final = ckptcore.Context(durability="none")
_AT_LEAST: Final = 0.5
"""Target: the time of torch divided by ours. It is below 1, because torch writes no checksums and no structure."""


def rows(setting: Setting) -> Iterator[Row]:
    """Measure a list of ints, a dict of floats, and a list of lists."""
    for name, state in _states(setting.count(1_000_000)).items():
        for case in _cases(setting.directory, name, {"v": state}):
            yield from compare(case, setting.rounds)


def _states(count: int) -> Mapping[str, Any]:
    numbers = random.Random(0)
    rows, columns = max(1, count // 100), min(100, count)
    return {
        f"list of {count} ints": [numbers.randrange(1 << 40) for _ in range(count)],
        f"dict of {count} floats": {number: numbers.random() for number in range(count)},
        f"{rows} lists of {columns} floats": [[numbers.random() for _ in range(columns)] for _ in range(rows)],
    }


def _cases(directory: Path, name: str, state: dict[str, Any]) -> Sequence[Case]:
    ours, theirs = directory / "ours", directory / "theirs.pt"
    ready, file = directory / f"ready {name}", directory / f"{name}.pt"
    ckptcore.save(ready, state, context=_FAST)
    torch.save(state, file)

    def clear() -> None:
        shutil.rmtree(ours, ignore_errors=True)
        theirs.unlink(missing_ok=True)

    return [
        Case(
            f"save a {name}",
            [
                Contender("ckptcore.save", lambda: ckptcore.save(ours, state, context=_FAST), clear),
                Contender("torch.save", partial(torch.save, state, theirs), clear, target=_AT_LEAST),
            ],
            writes=True,
        ),
        Case(
            f"load a {name}",
            [
                Contender("ckptcore.load_into", lambda: ckptcore.load_into(ready, state)),
                Contender("torch.load", lambda: torch.load(file, weights_only=True), target=_AT_LEAST),
                Contender("ckptcore.load", lambda: ckptcore.load(ready)),
            ],
        ),
    ]
