"""Panels: sections of the page of a run that other distributions add, by the entry point group ``ckptcore.panels``.

An entry point is a function ``panel(location, context)``. It returns the panel of the run at a path or URL as JSON, or
None if it has nothing to show there::

    {
        "title": "Goodput",
        "lines": ["text of a paragraph", ...],
        "bars": {"title": "Time", "parts": ["steps", "saves"], "rows": [{"name": "1", "seconds": [90.5, 9.5]}, ...]},
        "table": {"headings": ["job", "#failures"], "rows": [["1", "0"], ...]},
    }

All members except the title are optional. Columns of a table whose heading begins with ``#`` have numbers. The page
shows every text as text, and an error for a panel of another form. The result is cached for a minute.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from ckptcore.events import logger_named
from ckptcore.model import JSON
from ckptcore.redaction import redacted
from ckptcore_view.viewed import Viewed

_LOGGER: Final = logger_named("ckptcore.view")
_GROUP: Final = "ckptcore.panels"


def panels_of(viewed: Viewed, place: str) -> list[JSON]:
    """Return the panels of a run, in the order of the names of their entry points.

    A panel that fails is a panel with the error. The others are shown.
    """
    location = viewed.locate(place)
    panels: list[JSON] = []
    for entry in installed_panels():
        key = ("panel", entry.name, entry.value, location)
        remembered: tuple[JSON] | None = viewed.recall(key)
        if remembered is None:
            viewed.remember(key, remembered := (_panel(entry, location, viewed),))
        panels.append(remembered[0])
    return [panel for panel in panels if panel is not None]


@cache
def installed_panels() -> Sequence[EntryPoint]:
    """Return the entry points of panels, in the order of their names. Reads the installed packages once."""
    return sorted(entry_points(group=_GROUP), key=lambda entry: (entry.name, entry.value))


def _panel(entry: EntryPoint, location: str, viewed: Viewed) -> JSON:
    try:
        panel: JSON = entry.load()(location, viewed.context)
        json.dumps(panel, allow_nan=False)  # must not fail with the rest of the document
        if panel is not None and not _is_valid(panel):
            raise TypeError(f"{entry.value} returned {reprlib.repr(panel)}, which has not the form of a panel")
    except Exception as error:
        _LOGGER.exception("the panel %s (%s) fails", entry.name, entry.value)
        return {"title": entry.name, "error": redacted(f"{type(error).__name__}: {error}")}
    return panel


def _is_valid(panel: Any) -> bool:
    """Return True if the page can show a panel. See the docstring of the module."""
    try:
        bars, table = panel.get("bars"), panel.get("table")
        is_valid = _are_texts([panel["title"], *panel.get("lines", [])])
        if bars is not None:
            seconds = [row["seconds"] for row in bars["rows"]]
            is_valid &= _are_texts([bars["title"], *bars["parts"], *[row["name"] for row in bars["rows"]]])
            is_valid &= all(len(each) == len(bars["parts"]) and min(each, default=0) >= 0 for each in seconds)
        if table is not None:
            is_valid &= all(_are_texts(row) for row in (table["headings"], *table["rows"]))
    except (AttributeError, KeyError, TypeError):
        return False
    return is_valid


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)
