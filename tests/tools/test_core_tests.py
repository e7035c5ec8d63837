"""The pytest plugin ``tools.core_tests``: tests that need a missing package skip, others fail as usual."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ckptcore.errors import CheckpointError
from tests.architecture.sources import ROOT
from tools.core_tests import needs

TESTS = """
import ckptcore.errors

def test_that_passes():
    pass

def test_of_a_library():
    import ckptcore_no_such_library

def test_of_a_layout():
    raise ckptcore.errors.UnknownPluginError("no layout 'dcp'; install it with `pip install 'ckptcore[dcp]'`")

def test_of_a_bug():
    raise ckptcore.errors.CorruptCheckpointError("damaged", key="k")
"""


def test_only_missing_packages_skip(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "test_b.py").write_text("import ckptcore_no_such_library\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.core_tests", "-p", "no:cacheprovider", str(tmp_path)]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert "1 failed, 1 passed, 3 skipped" in run.stdout, run.stdout
    assert "test_of_a_bug" in run.stdout.partition("short test summary")[2]


def test_the_missing_package_is_read_from_an_error() -> None:
    assert needs(ModuleNotFoundError("No module named 'torch'", name="torch")) == "torch"
    assert needs(CheckpointError("run pip install 'ckptcore[s3]'")) == "pip install 'ckptcore[s3]'"
    assert needs(ExceptionGroup("ranks failed", [ValueError(), ModuleNotFoundError(name="jax")])) == "jax"
    assert needs(CheckpointError("damaged")) == needs(ValueError("pip install 'ckptcore[s3]'")) == ""
