"""Sample for the test matrix of `ckptcore_testing`: the layout `torch` is read-only."""

from __future__ import annotations

from typing import Final

from ckptcore_testing import LayoutSample

SAMPLE: Final = LayoutSample(name="torch", saves=False)
