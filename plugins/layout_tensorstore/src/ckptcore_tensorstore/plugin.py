"""The hooks of the tensorstore plugin. Imports no tensorstore: only a layout that is used does."""

from __future__ import annotations

__all__: list[str] = []
