"""Jobs of jax.distributed with real processes, of which one fails, is killed or hangs during a save.

If rank 0 fails, JAX ends every process, because rank 0 has its service. The tests of `ckptcore_jax` cover that case.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.jobs import failing_jax
from tests.jobs.failing_job import Cell
from tests.jobs.failures import fail, name_of

SAMPLE: Final = [Cell("save", "copy", "raise", 1), Cell("save", "written", "kill", 2), Cell("save", "write", "hang", 1)]


@pytest.mark.slow
@pytest.mark.parametrize("cell", SAMPLE, ids=name_of)
def test_one_rank_fails(cell: Cell, tmp_path: Path) -> None:
    fail(failing_jax, cell, 3, tmp_path / "place", leader_serves=True)
