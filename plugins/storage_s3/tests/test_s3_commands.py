"""The command line on S3: every command that takes a location runs as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_s3.testing import S3Server

import ckptcore

pytest.importorskip("click")


def _run(server: S3Server, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command. Environment variables tell it the address and credentials of the server."""
    return subprocess.run(
        [sys.executable, "-m", "ckptcore", *map(str, arguments)],
        env={**os.environ, **server.environment}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def _json(server: S3Server, *arguments: object) -> dict[str, Any]:
    result = _run(server, *arguments, "--json")
    assert result.returncode == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_a_run_is_copied_to_s3_and_back(ministack: S3Server, directory: Path) -> None:
    above = f"s3://{ministack.create_bucket()}/runs"
    with ckptcore.Checkpointer(directory / "run") as checkpointer:
        for step in range(3):
            checkpointer.save(step, {"x": np.arange(300_000) + step})
    copied = _json(ministack, "copy", directory / "run", f"{above}/run")
    assert [step["state"] for step in copied["steps"]] == ["copied"] * 3
    back = _json(ministack, "copy", f"{above}/run/1", directory / "back", "--verify")["copied"]
    assert (back["sent"], back["unverified"]) == (back["nbytes"], [])
    np.testing.assert_array_equal(ckptcore.load(directory / "back")["x"], np.arange(300_000) + 1)
    again = _json(ministack, "copy", directory / "run", f"{above}/run")
    assert [step["copied"]["sent"] for step in again["steps"]] == [0, 0, 0]


@pytest.mark.slow
def test_every_command(ministack: S3Server, directory: Path) -> None:
    above = f"s3://{ministack.create_bucket()}/runs"
    with ckptcore.Checkpointer(directory / "run") as checkpointer:
        for step in range(3):
            checkpointer.save(step, {"x": np.arange(300_000) + step})
    _json(ministack, "copy", directory / "run", f"{above}/run")
    assert [row["state"] for row in _json(ministack, "ls", f"{above}/run")["checkpoints"]] == ["committed"] * 3
    assert _json(ministack, "inspect", f"{above}/run/1")["totals"]["arrays"] == 1
    assert _json(ministack, "verify", f"{above}/run/1")["ok"]
    assert _json(ministack, "diff", f"{above}/run/1", directory / "run" / "1")["same"]
    assert _run(ministack, "diff", f"{above}/run/1", f"{above}/run/2").returncode == 1
    assert _json(ministack, "convert", f"{above}/run/1", f"{above}/converted", "--layout", "zarr3")["arrays"] == 1
    assert _json(ministack, "consolidate", f"{above}/converted", f"{above}/whole")["files"] == ["model.safetensors"]
    assert _json(ministack, "diff", f"{above}/whole", f"{above}/run/1", "--no-values")["same"]
    assert _json(ministack, "gc", f"{above}/run", "--policy", "latest_n=1", "--yes")["deleted"] == [0, 1]
    assert [step["sound"] for step in _json(ministack, "steps", f"{above}/run", "--verify")["steps"]] == [True]


def test_errors_have_exit_codes(ministack: S3Server) -> None:
    bucket = ministack.create_bucket()
    assert _run(ministack, "inspect", f"s3://{bucket}/nothing").returncode == 3
    missing = _run(ministack, "inspect", "s3://there-is-no-such-bucket/x")
    assert missing.returncode == 3
    assert missing.stderr.count("\n") == 1
    wrong = _run(ministack, "ls", f"s3://{bucket}", "--option", "s3.no_such_option=1")
    assert wrong.returncode == 2
    assert "no_such_option" in wrong.stderr
