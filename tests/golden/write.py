"""Writes the golden checkpoint of the current version of the format, once: ``python -m tests.golden.write``."""

from __future__ import annotations

from pathlib import Path

import ckptcore
from ckptcore.root import FORMAT_VERSION
from tests.golden.states import golden_state

if __name__ == "__main__":
    # Without overwrite: a golden checkpoint is never written again, or it would not show that old ones still load.
    directory = Path(__file__).parent / "checkpoints" / f"version-{FORMAT_VERSION}"
    directory.parent.mkdir(exist_ok=True)
    ckptcore.save(directory, golden_state(), metadata={"made for": "tests/golden"})
    print(f"wrote {directory}")
