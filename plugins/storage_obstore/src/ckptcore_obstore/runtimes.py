"""The process that obstore runs in.

obstore uses Rust threads. A forked child does not have these threads, so a call in the child would
hang.
"""

from __future__ import annotations

import os
from typing import Final

_IMPORTED_IN: Final = os.getpid()
"""Id of the process that imported this module for its first request."""


def runs_here() -> bool:
    """Return False in a forked child of the process that imported obstore."""
    return os.getpid() == _IMPORTED_IN
