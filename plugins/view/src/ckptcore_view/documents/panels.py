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
shows every text as text. The result is cached for a minute.
"""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint, entry_points
from typing import Final

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
    entries = sorted(entry_points(group=_GROUP), key=lambda entry: (entry.name, entry.value))
    panels: list[JSON] = []
    for entry in entries:
        key = ("panel", entry.name, entry.value, location)
        remembered: tuple[JSON] | None = viewed.recall(key)
        if remembered is None:
            viewed.remember(key, remembered := (_panel(entry, location, viewed),))
        panels.append(remembered[0])
    return [panel for panel in panels if panel is not None]


def _panel(entry: EntryPoint, location: str, viewed: Viewed) -> JSON:
    try:
        panel: JSON = entry.load()(location, viewed.context)
        json.dumps(panel, allow_nan=False)  # must not fail with the rest of the document
    except Exception as error:
        _LOGGER.exception("the panel %s (%s) fails", entry.name, entry.value)
        return {"title": entry.name, "error": redacted(f"{type(error).__name__}: {error}")}
    return panel
