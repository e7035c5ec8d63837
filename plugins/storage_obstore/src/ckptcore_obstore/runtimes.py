"""The process that obstore runs in: its threads are Rust's, and a child by fork has none of them; there a call would hang."""

from __future__ import annotations

import os
from typing import Final

__all__ = ["runs_here"]

_IMPORTED_IN: Final = os.getpid()
"""The process of the first request: this module is imported with it."""


def runs_here() -> bool:
    """Whether obstore can be used: not in a child by fork of a process that used it."""
    return os.getpid() == _IMPORTED_IN
