"""Draw the chart of the README and write the table of the documentation: ``python -m benchmarks.chart``.

Both are made of one report. The chart is an SVG image in ``docs/images``. Its caption, with the machine and the
versions, is text in the README, between two comments. The table is the page ``docs/reference/speed.md``.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

from benchmarks.peers import LOAD, SAVE
from benchmarks.report import Row

BEGIN: Final = "<!-- caption of the chart: written by python -m benchmarks.chart -->"
END: Final = "<!-- end of the caption -->"

_PAGE: Final = """# Speed

{run}

The ratio is the time of the other library divided by that of ckptcore, as the median over the rounds. Above 1, ckptcore
is faster. The rows in which it is slower come first. Each library has its defaults, unless its name says otherwise;
ckptcore also writes and verifies checksums.

{machine}

| measured | ckptcore | other library | its time | ratio |
|---|---|---|---|---|
{rows}

## What bounds the small rows

`python -m benchmarks --only bounds --scale 0.25` compares slices, small arrays and the metadata of a DCP checkpoint
with plain Python, which computes or verifies the same checksums and creates the same arrays. On a machine under load it
took 0.8 times the time of safetensors for 12 first slices, 0.13 times for a save of 250 small arrays, 0.06 times for
their load, and 0.5 times that of PyTorch for the metadata. So the Python calls of ckptcore bound these rows, not
reading, writing and hashing: 37 for each small array of a save, and 26 of a load (`python -m tools.counts`).
"""

_TITLES: Final = {SAVE: "Save, synced to disk", LOAD: "Load into new memory"}
_VERSIONS: Final = ("safetensors", "torch", "orbax-checkpoint", "jax")

_WIDTH: Final = 720
_PANEL: Final = _WIDTH // 2
_LABEL: Final = 96
"""Width of the names of libraries, in pixels."""
_VALUE: Final = 84
"""Width of the numbers after the bars, in pixels."""
_ROW: Final = 28
_TOP: Final = 48


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of the chart.

    Attributes:
        library: its name.
        speed: bytes per second.
    """

    library: str
    speed: float


def bars(report: Mapping[str, Any], case: str) -> Sequence[Bar]:
    """Return the bars of a case, the fastest library first.

    Raises:
        ValueError: the report has no such case.
    """
    rows = [row for row in report["benchmarks"].get("peers", ()) if row["case"] == case]
    if not rows:
        raise ValueError(f"the report has no case {case!r}: run python -m benchmarks --only peers --out FILE")
    by_speed = [Bar(row["contender"], row["nbytes"] / row["median"]) for row in rows]
    return sorted(by_speed, key=lambda bar: -bar.speed)


def draw(report: Mapping[str, Any]) -> str:
    """Return the chart as SVG. It is readable on light and dark pages."""
    panels = [(title, bars(report, case)) for case, title in _TITLES.items()]
    height = _TOP + max(len(panel) for _, panel in panels) * _ROW + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"',
        ' role="img" font-family="sans-serif" font-size="13">',
        f"<title>{escape('; '.join(_sentence(title, panel) for title, panel in panels))}</title>",
        f'<rect width="{_WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
    ]
    for number, (title, panel) in enumerate(panels):
        lines += _panel(number * _PANEL, title, panel)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _sentence(title: str, panel: Sequence[Bar]) -> str:
    return f"{title}: " + ", ".join(f"{bar.library} {bar.speed / 1e9:.2f} GB/s" for bar in panel)


def _panel(left: int, title: str, panel: Sequence[Bar]) -> Iterator[str]:
    longest = _PANEL - _LABEL - _VALUE
    yield f'<text x="{left + _LABEL}" y="26" font-size="15" font-weight="bold" fill="#1f2328">{escape(title)}</text>'
    for number, bar in enumerate(panel):
        top = _TOP + number * _ROW
        ours = bar.library == "ckptcore"
        width = max(1.0, bar.speed / panel[0].speed * longest)
        weight = ' font-weight="bold"' if ours else ""
        text = f'y="{top + 14}" fill="#1f2328"{weight}'
        yield f'<text x="{left + _LABEL - 8}" text-anchor="end" {text}>{escape(bar.library)}</text>'
        yield (
            f'<rect x="{left + _LABEL}" y="{top}" width="{width:.1f}" height="{_ROW - 8}" rx="2" '
            f'fill="{"#0969da" if ours else "#afb8c1"}"/>'
        )
        yield f'<text x="{left + _LABEL + width + 6:.1f}" {text}>{bar.speed / 1e9:.2f} GB/s</text>'


def caption(report: Mapping[str, Any]) -> str:
    """Return what was measured, on which machine, with which versions."""
    nbytes = max(row["nbytes"] for row in report["benchmarks"]["peers"])
    return _filled(
        f"{nbytes / 1e9:.2g} GB of bfloat16 in 75 arrays; median of {report['setting']['rounds']} rounds. "
        f"Each library uses its own format and its defaults; ckptcore also writes and verifies checksums. "
        f"{_machine(report)} `make bench` repeats it."
    )


def _machine(report: Mapping[str, Any]) -> str:
    machine, versions = report["machine"], report["versions"]
    used = ", ".join([f"{name} {versions[name]}" for name in _VERSIONS if name in versions])
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory'] / 2**30:.0f} GiB, "
        f"{machine['file_system']}, {machine['system']}; Python {versions['python']}, {used}."
    )


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def table(report: Mapping[str, Any]) -> str:
    """Return the page with a row for each peer of each case: those that are faster than ckptcore first."""
    found: list[tuple[Row, Row]] = []
    for stored in report["benchmarks"].values():
        rows = [Row(**{**row, "page_cache": None}) for row in stored]
        ours = {row.case: row for row in reversed(rows)}  # the first row of each case
        found += [(ours[row.case], row) for row in rows if row.ratio is not None and row.is_of_a_peer]
    ordered = sorted(
        found, key=lambda pair: (not pair[1].is_ahead_of_us, pair[1].ratio if pair[1].is_ahead_of_us else 0)
    )
    lines = [
        f"| {row.case} | {own.amount()} | {row.contender} | {row.amount()} | {row.ratio:.2f} |" for own, row in ordered
    ]
    setting = report["setting"]
    run = _filled(
        f"ckptcore compared with other libraries, by `python -m benchmarks --only {' '.join(report['benchmarks'])}`: "
        f"medians of {setting['rounds']} rounds, in which the contenders take turns, with {setting['scale']:.0%} of "
        f"the full sizes. `make bench` runs all benchmarks, and writes this page again."
    )
    return _PAGE.format(run=run, machine=_filled(_machine(report)), rows="\n".join(lines))


def with_caption(page: str, text: str) -> str:
    """Return a page with the caption between its two comments replaced.

    Raises:
        ValueError: the page does not have the comments.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the chart, and write the caption and the table."""
    root = Path(__file__).parents[1]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chart", description=__doc__)
    parser.add_argument("--results", type=Path, default=root / "benchmarks" / "results.json", help="a report")
    parser.add_argument("--chart", type=Path, default=root / "docs" / "images" / "speed.svg", help="the image to write")
    parser.add_argument("--readme", type=Path, default=root / "README.md", help="the page with the caption")
    parser.add_argument(
        "--page", type=Path, default=root / "docs" / "reference" / "speed.md", help="the table to write"
    )
    options = parser.parse_args(arguments)
    report = json.loads(options.results.read_text(encoding="utf-8"))
    options.chart.parent.mkdir(parents=True, exist_ok=True)
    options.chart.write_text(draw(report), encoding="utf-8")
    options.page.write_text(table(report), encoding="utf-8")
    page = options.readme.read_text(encoding="utf-8")
    options.readme.write_text(with_caption(page, caption(report)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
