"""Writes the golden checkpoint of the current version of the format, once: ``python -m tests.golden.write``.

That of version 1 is ``ckptcore.save(directory, golden_state(), metadata={"made for": "tests/golden"})``.
"""

from __future__ import annotations

from pathlib import Path

import ckptcore
from ckptcore.protocols import Coordinator
from ckptcore.root_json import FORMAT_VERSION
from ckptcore.testing import ThreadJob
from tests.golden.states import GOLDEN_PROCESSES, golden_composite

if __name__ == "__main__":
    # Without overwrite: a golden checkpoint is never written again, or it would not show that old ones still load.
    directory = Path(__file__).parent / "checkpoints" / f"version-{FORMAT_VERSION}"
    directory.parent.mkdir(exist_ok=True)

    def save(coordinator: Coordinator) -> None:
        """What each process of the job does."""
        ckptcore.save_checkpointables(
            directory,
            golden_composite(coordinator.rank),
            metadata={"made for": "tests/golden"},
            context=ckptcore.Context(coordinator=coordinator),
        )

    ThreadJob(GOLDEN_PROCESSES).run(save)
    print(f"wrote {directory}")
