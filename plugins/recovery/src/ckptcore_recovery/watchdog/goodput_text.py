"""Goodput as text: rows of tables and sentences, for the command line and for the page of a run."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from ckptcore_tools.formatting import format_count

from ckptcore.commit.location import LocationLike
from ckptcore.context import Context
from ckptcore.model import JSON
from ckptcore_recovery.watchdog.goodput import GROUPS, Goodput, IncarnationTime, Part, goodput_of, seconds
from ckptcore_recovery.watchdog.run_log import read_run_log
from ckptcore_recovery.watchdog.save_interval import SaveInterval, save_interval_of

_MEANINGS: Final[Mapping[Part, str]] = {
    "productive": "steps that were kept",
    "repeated": "steps that were executed again after a restart",
    "saving": "the training waited for saves",
    "starting": "before the first step",
    "loading": "the training waited for loads",
    "between": "between steps",
    "stopped": "between an intended end and the next start",
    "unfinished": "in the step that a failure interrupted",
    "down": "from a failure to the next start",
    "unrecorded": "the log was lost",
}

_SHOWN: Final = 50
"""Number of incarnations, the newest ones, that the page of a run shows."""

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def format_duration(duration: float) -> str:
    """Return seconds with three digits and a unit: ``1.25 ms``, ``42 s``, ``12.5 min``, ``3.25 h``, ``12 days``."""
    for unit, name in ((_DAY, "days"), (_HOUR, "h"), (_MINUTE, "min")):
        if duration >= 2 * unit:
            return f"{_three_digits(duration / unit)} {name}"
    return f"{_three_digits(duration)} s" if duration >= 1 or not duration else f"{_three_digits(1000 * duration)} ms"


def _three_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def format_share(share: float) -> str:
    """Return a part of 1 in percent."""
    return f"{100 * share:.1f} %"


def summary(goodput: Goodput) -> str:
    """Return a sentence about the whole run."""
    return (
        f"{format_share(goodput.share)} of {format_duration(seconds(goodput.total))} were productive, in "
        f"{format_count(len(goodput.incarnations), 'incarnation')} with {format_count(goodput.failures, 'failure')}."
    )


def part_rows(goodput: Goodput) -> Sequence[tuple[str, str, str, str]]:
    """Return name, time, share and meaning of each group, and of the parts of a group that has several.

    Parts without time are left out, and the group "unrecorded" without time.
    """
    rows: list[tuple[str, str, str, str]] = []
    parts = goodput.parts
    for group, members in GROUPS.items():
        time = sum(parts[part] for part in members)
        if group == "unrecorded" and not time:
            continue
        rows.append(_row(group, time, goodput, _MEANINGS[members[0]] if len(members) == 1 else ""))
        if len(members) > 1:
            rows += [_row(f"  {part}", parts[part], goodput, _MEANINGS[part]) for part in members if parts[part]]
    return rows


def _row(name: str, time: int, goodput: Goodput, meaning: str) -> tuple[str, str, str, str]:
    return name, format_duration(seconds(time)), format_share(time / goodput.total if goodput.total else 0.0), meaning


def began_text(incarnation: IncarnationTime) -> str:
    """Return the start of an incarnation, in UTC."""
    began = datetime.datetime.fromtimestamp(seconds(incarnation.began), datetime.UTC)
    return began.strftime("%Y-%m-%d %H:%M:%S")


def remarks(goodput: Goodput) -> Iterator[str]:
    """Yield sentences about the save interval that loses least, and about clocks that differ."""
    yield from _interval_remarks(goodput)
    if goodput.overlaps:
        numbers = ", ".join(map(str, goodput.overlaps))
        yield (
            f"Began before the previous incarnation ended: {numbers}. The clocks of their hosts differ, or both ran. "
            "The time between them counts as 0."
        )


def _interval_remarks(goodput: Goodput) -> Iterator[str]:
    interval = save_interval_of(goodput)
    if interval is None:
        yield "No step was saved, so the save interval that loses least is not known."
        return
    parts = goodput.parts
    seen = format_duration(seconds(goodput.total - parts["stopped"] - parts["down"]))
    now = f"A save blocks the training for {format_duration(interval.cost)}, every {_interval(interval, interval.now)}."
    if interval.best is None or interval.longest is None:
        yield now
        yield (
            f"No failure was seen in {seen}, so the interval that loses least is not known. With 95 % confidence it is "
            f"at least {_interval(interval, interval.shortest)}."
        )
        return
    yield (
        f"{now} With {format_count(goodput.failures, 'failure')} in {seen}, this loses on average "
        f"{format_share(interval.lost_now or 0.0)} of the time, to saves and to the work since the last save."
    )
    yield (
        f"An interval of {_interval(interval, interval.best)} loses least: {format_share(interval.lost_best or 0.0)}. "
        f"With 95 % confidence in the failure rate, it is from {_interval(interval, interval.shortest)} to "
        f"{_interval(interval, interval.longest)}."
    )


def _interval(interval: SaveInterval, duration: float) -> str:
    return f"{format_duration(duration)} ({format_count(max(1, round(duration / interval.step)), 'step')})"


def panel(location: LocationLike, context: Context) -> Mapping[str, JSON] | None:
    """Return the panel of a run for ``ckptcore view``; None if the run has no log. See `ckptcore_view.documents`."""
    goodput = goodput_of(read_run_log(location, context))
    if not goodput.incarnations:
        return None
    groups = [group for group, time in goodput.groups.items() if time]
    bars: list[JSON] = [
        {
            "name": f"{incarnation.number}, {incarnation.state}",
            "seconds": [seconds(sum(incarnation.parts[part] for part in GROUPS[group])) for group in groups],
        }
        for incarnation in goodput.incarnations[-_SHOWN:]
    ]
    older = len(goodput.incarnations) - len(bars)
    # HTML collapses spaces, but not this one.
    rows: list[JSON] = [[name.replace("  ", "\N{EM SPACE}"), *others] for name, *others in part_rows(goodput)]
    return {
        "title": "Goodput",
        "lines": [
            summary(goodput),
            *remarks(goodput),
            *([f"The figure has the newest {_SHOWN} incarnations. `ckptcore goodput` shows all."] if older else []),
        ],
        "bars": {"title": "Time of each incarnation, and the time after it", "parts": [*groups], "rows": bars},
        "table": {"headings": ["part", "#time", "#share", "meaning"], "rows": rows},
    }
