"""Table and plot of `benchmarks.scale` for the documentation: ``python -m benchmarks.scale_report DIRECTORY FILE...``.

Writes ``large-jobs.svg`` and ``large-jobs.json`` into the directory, and prints the table.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_COLORS: Final = {"safetensors": "#0072b2", "ocdbt": "#d55e00", "zarr3": "#009e73", "dcp": "#cc79a7"}
_PHASES: Final = ("exchange", "decode", "cover", "finish", "root")
_WIDTH, _HEIGHT, _MARGIN = 720, 400, 56
_LEAST_SECONDS, _MOST_SECONDS = 0.05, 100.0
_SIZES: Final = (64, 256, 1024, 4096, 16384)


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Return the lines of the table in Markdown."""
    yield (
        "| layout | processes | chunks | a process: CPU s | sent, KB | received, KB | peak, MB | "
        + " | ".join(f"leader: {phase}, s" for phase in _PHASES)
        + " | total, s | received, MB | messages | peak, GB |"
    )
    yield "|---" + "|--:" * (6 + len(_PHASES) + 4) + "|"
    for row in rows:
        process, leader = sum(row["process"].values()), row["leader"]
        cells = [
            row["layout"], f"{row['size']:,}", f"{row['chunks']:,}", f"{process:.2f}",
            f"{row['sent']['process'] / 1e3:.0f}", f"{row['received']['process'] / 1e3:.1f}",
            f"{row['process_memory'] / 1e6:.0f}",
            *[f"{leader[phase]:.1f}" for phase in _PHASES], f"{sum(leader.values()):.1f}",
            f"{row['received']['leader'] / 1e6:.0f}", f"{row['messages']['leader']:,}",
            f"{row['leader_memory'] / 1e9:.1f}",
        ]  # fmt: skip
        yield "| " + " | ".join(cells) + " |"


def plot(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return an SVG plot of the CPU seconds of the leader and of another process over the size of the job."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        "<title>CPU seconds of the leader (solid) and of another process (dashed) in a save</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for size in _SIZES:
        x = _x(size)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="20" y2="{_HEIGHT - _MARGIN}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _MARGIN + 18}" text-anchor="middle">{size:,}</text>')
    for seconds in (0.1, 1.0, 10.0, 60.0):
        y = _y(seconds)
        color = "#c00" if seconds == 60.0 else "#ddd"
        parts.append(f'<line x1="{_MARGIN}" x2="{_WIDTH - 130}" y1="{y:.1f}" y2="{y:.1f}" stroke="{color}"/>')
        parts.append(f'<text x="{_MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{seconds:g}</text>')
    parts.append(f'<text x="{(_WIDTH - 74) / 2:.0f}" y="{_HEIGHT - 14}" text-anchor="middle">processes</text>')
    parts.append(
        f'<text transform="translate(16 {_HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">CPU seconds</text>'
    )
    for number, (layout, color) in enumerate(_COLORS.items()):
        chosen = sorted((row for row in rows if row["layout"] == layout), key=lambda row: int(row["size"]))
        for role, dashes in (("leader", ""), ("process", ' stroke-dasharray="5 4"')):
            points = [(_x(row["size"]), _y(sum(row[role].values()))) for row in chosen]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>')
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points]
        y = 40 + 20 * number
        parts.append(f'<rect x="{_WIDTH - 112}" y="{y - 9}" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{_WIDTH - 94}" y="{y + 2}">{layout}</text>')
    parts.append(f'<text x="{_WIDTH - 112}" y="132">solid: the leader</text>')
    parts.append(f'<text x="{_WIDTH - 112}" y="150">dashed: another</text>')
    return "\n".join([*parts, "</svg>", ""])


def _x(size: float) -> float:
    share = (math.log(size) - math.log(_SIZES[0])) / (math.log(_SIZES[-1]) - math.log(_SIZES[0]))
    return _MARGIN + 20 + share * (_WIDTH - 130 - _MARGIN - 40)


def _y(seconds: float) -> float:
    share = (math.log(seconds) - math.log(_LEAST_SECONDS)) / (math.log(_MOST_SECONDS) - math.log(_LEAST_SECONDS))
    return _HEIGHT - _MARGIN - share * (_HEIGHT - _MARGIN - 20)


def main(arguments: Sequence[str]) -> None:
    """Write the plot and the rows, and print the table."""
    directory, *files = arguments
    rows = [json.loads(Path(file).read_text(encoding="utf-8")) for file in files]
    rows.sort(key=lambda row: (list(_COLORS).index(row["layout"]), row["size"]))
    lines = ",\n".join(json.dumps(row) for row in rows)
    (Path(directory) / "large-jobs.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    (Path(directory) / "large-jobs.svg").write_text(plot(rows), encoding="utf-8")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main(sys.argv[1:])
