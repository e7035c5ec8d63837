"""The optimizers of two stages on four real processes. They save one state, which one process can load, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.optimizer_stages import load_whole, load_whole_by_torch
from tests.jobs.processes import run_job
from tests.jobs.topologies import LAYOUTS


@pytest.mark.slow  # `test_real_jobs` runs a sample of this test
def test_stages_continue_training_and_one_process_loads_all(tmp_path: Path) -> None:
    run_job("tests.jobs.torch_program", "optimizers", tmp_path, size=4, layouts=LAYOUTS)
    for layout in LAYOUTS:
        load_whole(tmp_path, layout)
    load_whole_by_torch(tmp_path)
