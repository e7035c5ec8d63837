"""Add the root of the repository to the path, so that ``examples`` can always be imported."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
