"""Parts of checkpoints: rows of arrays beside `safe_open(...).get_slice` of safetensors, and the experts of one process of eight.

Both sides give out copies. Safetensors maps its file and verifies nothing; ckptcore verifies a block of 1 MiB when something of it is read first.
So there are rows for what is open and was read before, where both do the same work, and rows that open the checkpoint each time, where ckptcore
reads and verifies sixteen times the bytes that are wanted. Beside each stands what it takes with `Context(verify=False)`. A Context remembers what the
roots said that it opened last: rows of openings stand for the second one and all after it, and those with a new Context for the first.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

import ckptcore
from benchmarks.alternating import Contender, compare
from ckptcore import LoadReport, select
from ckptcore.model import Box

__all__ = ["rows"]

_FAST = ckptcore.Context(durability="none")
_TRUSTING = ckptcore.Context(durability="none", verify=False)
_LAYOUTS = ("safetensors", "dcp", "zarr3", "ocdbt")
_ROWS = 16
_SETTLED_SECONDS = 2.5
"""Before a file is so old, it could change without that showing in its times, and what is read of it is verified each time."""

_EXPERTS = 8
_MOST_READ = 1.05
"""How many times an eighth of the bytes of the experts a process may read that wants an eighth of them."""


def rows(directory: Path, rounds: int) -> Iterator[tuple[str, bool]]:
    """Lines of the table, and whether each reached its target."""
    generator = np.random.default_rng(0)
    state = {f"layers.{number}.weight": generator.random((1024, 1024), np.float32) for number in range(48)}
    for layout in _LAYOUTS:
        ckptcore.save(directory / layout, state, layout=layout, context=_FAST)
    time.sleep(_SETTLED_SECONDS)
    file = directory / "safetensors" / "model.safetensors"
    wanted = [(name, start) for name in state for start in range(0, 1024 - _ROWS, 8 * _ROWS)]
    random.Random(0).shuffle(wanted)
    walk = [("layers.7.weight", start) for start in range(0, 1024, _ROWS)]
    rows_of, columns_of = (
        (lambda start: slice(start, start + _ROWS)),
        (lambda start: (slice(None), slice(start, start + _ROWS))),
    )
    yield from _case("slices: an open checkpoint, in order", _in_place(directory, file, walk, rows_of, rounds), 1.0)
    yield from _case(
        "slices: an open checkpoint, anywhere", _in_place(directory, file, wanted[:150], rows_of, rounds), 1.0
    )
    yield from _case("slices: an open checkpoint, columns", _in_place(directory, file, walk, columns_of, rounds), 1.0)
    many = {f"layers.{number}.weight": generator.random((64, 64), np.float32) for number in range(1000)}
    ckptcore.save(directory / "many", many, context=_FAST)
    yield from _case("slices: open, one slice", _opening(directory, file, wanted[:1], rounds), None)
    yield from _case("slices: open 1000 arrays, one slice", _opening_many(directory / "many", rounds), None)
    yield from _case("slices: open, one slice of each array", _opening(directory, file, wanted[:48], rounds), None)
    del state
    yield _experts(directory, rounds)


def _in_place(
    directory: Path, file: Path, wanted: list[tuple[str, int]], index: Callable[[int], Any], rounds: int
) -> list[tuple[str, float, float]]:
    """Slices of what is open; of each contender the name, the seconds for one slice, and the ratio."""
    with safe_open(file, "numpy") as theirs:

        def reference() -> None:
            for name, start in wanted:
                theirs.get_slice(name)[index(start)]

        contenders = [Contender("safe_open, get_slice", reference)]
        for layout, context in _ours():
            contenders.append(Contender(_named(layout, context), _reading(directory / layout, context, wanted, index)))
        return [
            (outcome.name, outcome.median / len(wanted), outcome.ratio)
            for outcome in compare(contenders, rounds=rounds)
        ]


def _opening(directory: Path, file: Path, wanted: list[tuple[str, int]], rounds: int) -> list[tuple[str, float, float]]:
    """The same with what opens the checkpoint; the seconds are those of all."""

    def reference() -> None:
        with safe_open(file, "numpy") as theirs:
            for name, start in wanted:
                theirs.get_slice(name)[start : start + _ROWS]

    def loading() -> None:
        for name, start in wanted:
            box = Box((start, 0), (start + _ROWS, 1024))
            ckptcore.load_slice(directory / "safetensors", name, box, context=_FAST)

    contenders = [Contender("safe_open, get_slice", reference)]
    if len(wanted) == 1:
        contenders.append(Contender("load_slice, safetensors", loading))
    contenders += [
        Contender(_named(layout, context), _reading_anew(directory / layout, context, wanted))
        for layout, context in _ours()
    ]
    contenders += _first_openings(directory / "safetensors", wanted)
    return [(outcome.name, outcome.median, outcome.ratio) for outcome in compare(contenders, rounds=rounds)]


def _opening_many(location: Path, rounds: int) -> list[tuple[str, float, float]]:
    """The same of a checkpoint whose arrays are many, where what it takes to know them is most of it."""
    wanted = [("layers.7.weight", 0)]

    def reference() -> None:
        with safe_open(location / "model.safetensors", "numpy") as theirs:
            for name, start in wanted:
                theirs.get_slice(name)[start : start + _ROWS]

    contenders = [
        Contender("safe_open, get_slice", reference),
        Contender("ckptcore.open", _reading_anew(location, _FAST, wanted)),
        Contender("ckptcore.open, verify=False", _reading_anew(location, _TRUSTING, wanted)),
        *_first_openings(location, wanted),
    ]
    return [(outcome.name, outcome.median, outcome.ratio) for outcome in compare(contenders, rounds=rounds)]


def _first_openings(location: Path, wanted: list[tuple[str, int]]) -> list[Contender]:
    return [
        Contender(f"ckptcore.open, new Context{told}", _reading_anew(location, None, wanted, verify=verify))
        for verify, told in ((True, ""), (False, ", verify=False"))
    ]


def _reading_anew(
    location: Path, context: ckptcore.Context | None, wanted: list[tuple[str, int]], *, verify: bool = True
) -> Callable[[], None]:
    """Open a checkpoint, by a Context of its own where none is given, and read slices."""

    def run() -> None:
        with ckptcore.open(location, context=context or ckptcore.Context(verify=verify)) as opened:
            for name, start in wanted:
                opened[name][start : start + _ROWS]

    return run


def _ours() -> Iterator[tuple[str, ckptcore.Context]]:
    yield "safetensors", _FAST
    yield "safetensors", _TRUSTING
    for layout in _LAYOUTS[1:]:
        yield layout, _FAST


def _named(layout: str, context: ckptcore.Context) -> str:
    return f"ckptcore.open, {layout}" + ("" if context.verify else ", verify=False")


def _reading(
    location: Path, context: ckptcore.Context, wanted: list[tuple[str, int]], index: Callable[[int], Any]
) -> Callable[[], None]:
    opened = ckptcore.open(location, context=context)

    def run() -> None:
        for name, start in wanted:
            opened[name][index(start)]

    return run


def _case(name: str, measured: list[tuple[str, float, float]], target: float | None) -> Iterator[tuple[str, bool]]:
    for number, (contender, seconds, ratio) in enumerate(measured):
        is_ours = target is not None and contender == "ckptcore.open, safetensors"
        reached = not is_ours or target is None or ratio >= target
        verdict = f"{target:.2f} {'reached' if reached else 'MISSED'}" if is_ours else ""
        yield (
            f"{name if number == 0 or is_ours else '':42} {contender:36} {seconds * 1e6:7.1f} us {ratio:7.2f}  {verdict}",
            reached,
        )


def _experts(directory: Path, rounds: int) -> tuple[str, bool]:
    """The experts of one process of eight; 8 MiB each in two arrays, in the order in which Hugging Face has them."""
    generator = np.random.default_rng(0)
    state = {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight": generator.integers(
            0, 99, (1 << 11, 1 << 10), np.int32
        )
        for layer in range(1)
        for expert in range(4 * _EXPERTS)
        for part in ("w1", "w2")
    }
    location = directory / "mixture"
    ckptcore.save(location, state, context=_FAST)
    nbytes = sum(array.nbytes for array in state.values())
    del state
    report = LoadReport()
    own = select.experts("model.layers.*.mlp.experts.{expert}.*", range(4))

    whole, part = compare(
        [
            Contender("all", lambda: ckptcore.load(location, context=_FAST)),
            Contender("own", lambda: ckptcore.load(location, context=_FAST, select=own, report=report)),
        ],
        rounds=rounds,
        memory=nbytes,
    )
    share = report.bytes_read * _EXPERTS / nbytes
    took = _EXPERTS * part.median / whole.median
    told = f"bytes read {share:.3f}/8, time {whole.median * 1e3:.0f} ms -> {part.median * 1e3:.0f} ms = {took:.2f}/8"
    verdict = "reached" if share <= _MOST_READ else "MISSED"
    return (
        f"{'slices: 1/8 of the experts':42} {'load(select=experts(...))':36} {told}  {_MOST_READ}/8 {verdict}",
        share <= _MOST_READ,
    )
