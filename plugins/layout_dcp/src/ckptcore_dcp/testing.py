"""The sample of the layout torch for the matrix of `ckptcore_testing`: it reads only."""

from __future__ import annotations

from typing import Final

from ckptcore_testing import LayoutSample

__all__ = ["SAMPLE"]

SAMPLE: Final = LayoutSample(name="torch", saves=False)
"""Files of torch.save are read, and not written."""
