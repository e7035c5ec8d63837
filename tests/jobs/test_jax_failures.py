"""A process of a jax.distributed job that fails, is killed or hangs in a save: real processes.

JAX ends every process if that of rank 0 fails, which has its service: see the tests of `ckptcore_jax` for that.
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
