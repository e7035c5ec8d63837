"""Parts of checkpoints: rows of arrays, compared with `get_slice` of safetensors, and the experts of one process.

Both libraries return copies. safetensors maps its file and verifies nothing. ckptcore verifies a block, of 64 KiB in
these checkpoints, the first time that it reads from the block. Some rows therefore read blocks that are verified
already, so that both libraries do the same work. Others open the checkpoint each time, so that ckptcore also verifies.
Each row is also measured with `Context(io=IOOptions(verify=False))`. A Context caches the roots that
it opened last, so rows of openings measure openings after the first; rows with a new Context measure the first one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

import ckptcore
from benchmarks.alternating import Case, Contender, compare
from benchmarks.report import Row
from benchmarks.setting import Setting
from ckptcore import select
from ckptcore.results import LoadReport
from ckptcore.select import Selection

_FAST = ckptcore.Context(durability="none")
_TRUSTING = ckptcore.Context(durability="none", io=ckptcore.context.IOOptions(verify=False))
_LAYOUTS = ("safetensors", "dcp", "zarr3", "ocdbt")
_ROWS = 16
SETTLED_SECONDS = 2.5
"""Wait after a save, in seconds. ckptcore verifies every read of a file that changed more recently, because its
times may not show a further change."""

_EXPERTS = 8
_MOST_READ = 1.05
"""Limit of the bytes read by a process that loads an eighth of the experts, relative to their bytes."""


def rows(setting: Setting) -> Iterator[Row]:
    """Measure slices of open checkpoints, openings, and a selection of experts."""
    directory = setting.directory
    for case in chain(_slice_cases(setting, directory), _opening_cases(setting, directory)):
        yield from compare(case, setting.rounds)
    yield from _experts(setting, directory)


def _slice_cases(setting: Setting, directory: Path) -> Iterator[Case]:
    generator = np.random.default_rng(0)
    arrays = setting.count(48, least=8)
    state = {f"layers.{number}.weight": generator.random((1024, 1024), np.float32) for number in range(arrays)}
    for layout in _LAYOUTS:
        ckptcore.save(directory / layout, state, layout=layout, context=_FAST)
    time.sleep(SETTLED_SECONDS)
    walk = [("layers.7.weight", start) for start in range(0, 1024, _ROWS)]
    anywhere = _places(arrays)[:150]
    with ExitStack() as stack:
        theirs = stack.enter_context(safe_open(directory / "safetensors" / "model.safetensors", "numpy"))
        ours = {
            _named(layout, context): stack.enter_context(ckptcore.open(directory / layout, context=context))
            for layout, context in _ours()
        }
        yield _in_place(f"slices: {len(walk)} in order", ours, theirs, walk, _rows_of)
        yield _in_place(f"slices: {len(anywhere)} anywhere", ours, theirs, anywhere, _rows_of)
        yield _in_place(f"slices: {len(walk)} of columns", ours, theirs, walk, _columns_of)


def _opening_cases(setting: Setting, directory: Path) -> Iterator[Case]:
    arrays = setting.count(48, least=8)
    many = setting.count(1000, least=8)
    small = {f"layers.{number}.weight": np.full((64, 64), number, np.float32) for number in range(many)}
    ckptcore.save(directory / "many", small, context=_FAST)
    yield _opening("slices: open, one slice", directory, _places(arrays)[:1])
    yield _opening_many(f"slices: open {many} arrays, one slice", directory / "many")
    yield _opening(f"slices: open, {arrays} slices", directory, _places(arrays)[:arrays])


def _places(arrays: int) -> list[tuple[str, int]]:
    places = [
        (f"layers.{number}.weight", start) for number in range(arrays) for start in range(0, 1024 - _ROWS, 8 * _ROWS)
    ]
    random.Random(0).shuffle(places)
    return places


def _rows_of(start: int) -> slice:
    return slice(start, start + _ROWS)


def _columns_of(start: int) -> tuple[slice, slice]:
    return slice(None), slice(start, start + _ROWS)


def _in_place(
    name: str, ours: Mapping[str, Any], theirs: Any, wanted: list[tuple[str, int]], index: Callable[[int], Any]
) -> Case:
    """Compare slices of checkpoints that are open."""

    def reading(checkpoint: Any) -> None:
        for array, start in wanted:
            checkpoint[array][index(start)]

    def reference() -> None:
        for array, start in wanted:
            theirs.get_slice(array)[index(start)]

    first, *others = [Contender(of_one, partial(reading, checkpoint)) for of_one, checkpoint in ours.items()]
    return Case(name, [first, Contender("safe_open, get_slice", reference, target=1.0), *others])


def _opening(name: str, directory: Path, wanted: list[tuple[str, int]]) -> Case:
    """Compare opening a checkpoint and reading slices of it."""

    def loading() -> None:
        for array, start in wanted:
            with ckptcore.open(directory / "safetensors", context=_FAST) as checkpoint:
                _ = checkpoint[array][start : start + _ROWS]

    ours, *others = [
        Contender(_named(layout, context), open_and_read(directory / layout, context, wanted))
        for layout, context in _ours()
    ]
    location = directory / "safetensors"
    contenders = [ours, Contender("safe_open, get_slice", partial(open_with_safetensors, location, wanted))]
    if len(wanted) == 1:
        contenders.append(Contender("open for one slice, safetensors", loading))
    return Case(name, [*contenders, *others, *_first_openings(location, wanted)])


def open_with_safetensors(location: Path, wanted: list[tuple[str, int]]) -> None:
    """Open the file of a checkpoint with safetensors, and read slices."""
    with safe_open(location / "model.safetensors", "numpy") as theirs:
        for array, start in wanted:
            theirs.get_slice(array)[start : start + _ROWS]


def _opening_many(name: str, location: Path) -> Case:
    """Compare openings of checkpoints of many arrays, whose metadata takes most of the time."""
    wanted = [("layers.7.weight", 0)]
    return Case(
        name,
        [
            Contender("ckptcore.open", open_and_read(location, _FAST, wanted)),
            Contender("safe_open, get_slice", partial(open_with_safetensors, location, wanted)),
            Contender("ckptcore.open, verify=False", open_and_read(location, _TRUSTING, wanted)),
            *_first_openings(location, wanted),
        ],
    )


def _first_openings(location: Path, wanted: list[tuple[str, int]]) -> list[Contender]:
    return [
        Contender(f"ckptcore.open, new Context{suffix}", open_and_read(location, None, wanted, verify=verify))
        for verify, suffix in ((True, ""), (False, ", verify=False"))
    ]


def open_and_read(
    location: Path, context: ckptcore.Context | None, wanted: list[tuple[str, int]], *, verify: bool = True
) -> Callable[[], None]:
    """Open a checkpoint, with a new Context unless one is passed, and read slices."""

    def run() -> None:
        with ckptcore.open(
            location, context=context or ckptcore.Context(io=ckptcore.context.IOOptions(verify=verify))
        ) as checkpoint:
            for name, start in wanted:
                checkpoint[name][start : start + _ROWS]

    return run


def _ours() -> Iterator[tuple[str, ckptcore.Context]]:
    yield "safetensors", _FAST
    yield "safetensors", _TRUSTING
    for layout in _LAYOUTS[1:]:
        yield layout, _FAST


def _named(layout: str, context: ckptcore.Context) -> str:
    return f"ckptcore.open, {layout}" + ("" if context.io.verify else ", verify=False")


def _experts(setting: Setting, directory: Path) -> Iterator[Row]:
    """Load the experts of one process of eight from a checkpoint in the order of Hugging Face."""
    generator = np.random.default_rng(0)
    side = setting.count(1 << 11, least=64)
    state = {
        f"model.layers.0.mlp.experts.{expert}.{part}.weight": generator.integers(0, 99, (side, 1 << 10), np.int32)
        for expert in range(4 * _EXPERTS)
        for part in ("w1", "w2")
    }
    location = directory / "mixture"
    ckptcore.save(location, state, context=_FAST)
    nbytes = sum(array.nbytes for array in state.values())
    del state
    report = LoadReport()
    own = select.experts("model.layers.*.mlp.experts.{expert}.*", range(4))
    case = Case(
        "slices: 1/8 of the experts",
        [
            Contender("ckptcore.load(select=...)", partial(_load_own, location, own, report)),
            Contender("ckptcore.load, all experts", partial(ckptcore.load, location, context=_FAST)),
        ],
        memory=nbytes,
    )
    part, whole = compare(case, setting.rounds)
    share = report.bytes_read * _EXPERTS / nbytes
    reached = share <= _MOST_READ
    yield replace(part, target=f"at most {_MOST_READ}/8 read", reached=reached, note=f"{share:.3f}/8 of the bytes read")
    yield whole


def _load_own(location: Path, own: Selection, report: LoadReport) -> object:
    return ckptcore.load(location, context=_FAST, select=own, report=report)
