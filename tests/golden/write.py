"""Writes the golden checkpoint of the current version of the format, once: ``python -m tests.golden.write``.

That of version 1 is ``ckptcore.save(directory, golden_state(), metadata={"made for": "tests/golden"})``; that of version 2 is
``ckptcore.save_checkpointables(directory, golden_composite(rank), metadata={"made for": "tests/golden"})`` in a job of `GOLDEN_PROCESSES`.
"""

from __future__ import annotations

from pathlib import Path

import ckptcore
from ckptcore.commit.root_json import FORMAT_VERSION
from tests.golden.states import golden_update

if __name__ == "__main__":
    # Without overwrite: a golden checkpoint is never written again, or it would not show that old ones still load.
    directory = Path(__file__).parent / "checkpoints" / f"version-{FORMAT_VERSION}"
    directory.parent.mkdir(exist_ok=True)
    context = ckptcore.Context(durability="none")
    base = directory.parent / "version-1"
    ckptcore.save_update(directory, golden_update(), base=base, metadata={"made for": "tests/golden"}, context=context)
    print(f"wrote {directory}")
