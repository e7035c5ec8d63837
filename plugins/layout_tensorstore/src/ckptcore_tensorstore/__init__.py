"""The layouts zarr, zarr3 and ocdbt: checkpoints that Orbax reads, and those that Orbax writes."""

from __future__ import annotations

__all__: list[str] = []
