"""Numbers of checkpoints, as numbers or text of JSON."""

from __future__ import annotations

import math

from ckptcore.model import JSON


def number_to_json(number: complex | bool | str | None) -> JSON:
    """Return a number for JSON: as text if JSON or JavaScript cannot represent it."""
    if isinstance(number, complex):
        return str(number)
    if isinstance(number, float):
        return number if math.isfinite(number) else str(number)
    if isinstance(number, int) and not isinstance(number, bool) and abs(number) > 1 << 53:
        return str(number)
    return number
