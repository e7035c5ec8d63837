"""The process that obstore runs in.

obstore uses Rust threads, which a forked child lacks, so a call there would hang.
"""

from __future__ import annotations

import os
from typing import Final

_IMPORTED_IN: Final = os.getpid()
"""Process of the first request, which imports this module."""


def runs_here() -> bool:
    """Return False in a forked child of the process that imported obstore."""
    return os.getpid() == _IMPORTED_IN
