"""Tells the test matrix of `ckptcore_testing` that the layout `torch` is read-only."""

from __future__ import annotations

from typing import Final

from ckptcore_testing import LayoutSample

__all__ = ["SAMPLE"]

SAMPLE: Final = LayoutSample(name="torch", saves=False)
