"""Jobs that save a tree of objects as TorchTitan does. Jobs of another size resume with the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugins.torch_backend.tests.conftest import Torchrun

pytestmark = pytest.mark.system

PROGRAM = Path(__file__).with_name("titan_job.py")


@pytest.mark.slow
def test_a_job_of_another_size_resumes(torchrun: Torchrun, tmp_path: Path) -> None:
    torchrun(4, PROGRAM, "save", tmp_path)
    torchrun(2, PROGRAM, "load", tmp_path)
