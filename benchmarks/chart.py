"""Draw the chart of the README from a report: ``python -m benchmarks.chart [--results FILE] [--readme FILE]``.

The chart is an SVG image in ``docs/images``. Its caption, with the machine and the versions, is text in the README,
between two comments.
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

BEGIN: Final = "<!-- caption of the chart: written by python -m benchmarks.chart -->"
END: Final = "<!-- end of the caption -->"

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
    machine, versions, setting = report["machine"], report["versions"], report["setting"]
    nbytes = max(row["nbytes"] for row in report["benchmarks"]["peers"])
    used = ", ".join([f"{name} {versions[name]}" for name in _VERSIONS if name in versions])
    text = (
        f"{nbytes / 1e9:.2g} GB of bfloat16 in 75 arrays; median of {setting['rounds']} rounds. "
        f"Each library uses its own format and its defaults; ckptcore also writes and verifies checksums. "
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory'] / 2**30:.0f} GiB, "
        f"{machine['file_system']}, {machine['system']}; Python {versions['python']}, {used}. "
        f"`make bench` repeats it."
    )
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


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
    """Draw the chart and write the caption."""
    root = Path(__file__).parents[1]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chart", description=__doc__)
    parser.add_argument("--results", type=Path, default=root / "benchmarks" / "results.json", help="a report")
    parser.add_argument("--chart", type=Path, default=root / "docs" / "images" / "speed.svg", help="the image to write")
    parser.add_argument("--readme", type=Path, default=root / "README.md", help="the page with the caption")
    options = parser.parse_args(arguments)
    report = json.loads(options.results.read_text(encoding="utf-8"))
    options.chart.parent.mkdir(parents=True, exist_ok=True)
    options.chart.write_text(draw(report), encoding="utf-8")
    page = options.readme.read_text(encoding="utf-8")
    options.readme.write_text(with_caption(page, caption(report)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
