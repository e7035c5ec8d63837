"""Copies of Orbax checkpoints without a conversion. The files are unchanged, and Orbax loads them."""

from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptcore

pytestmark = [
    # These tests load without shardings, of which Orbax warns.
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
]

GOLDEN = Path(__file__).parent / "golden"


def _files(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_orbax_loads_a_copy(tmp_path):
    state = {"w": np.arange(100_000.0).reshape(100, 1000), "step": np.int32(7)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "written", state)
        checkpointer.wait_until_finished()
        between = f"memory://{tmp_path.name}/checkpoint"
        ckptcore.copy(tmp_path / "written", between, verify="read-back")
        ckptcore.copy(between, tmp_path / "copy")
        assert _files(tmp_path / "copy") == _files(tmp_path / "written")
        restored = checkpointer.restore(tmp_path / "copy")
    np.testing.assert_array_equal(restored["w"], state["w"])
    assert restored["step"] == 7


@pytest.mark.parametrize("name", ["v1_composite", "v1_sharded", "v0_items", "v0_without_metadata", "legacy_msgpack"])
def test_every_file_is_copied(name, tmp_path):
    between = f"memory://{tmp_path.name}/{name}"
    ckptcore.copy(GOLDEN / name, between)
    ckptcore.copy(between, tmp_path / "copy")
    assert _files(tmp_path / "copy") == _files(GOLDEN / name)


@pytest.mark.parametrize("name", ["manager", "manager_items"])
def test_a_run_of_orbax_is_copied(name, tmp_path):
    between = f"memory://{tmp_path.name}/{name}"
    first = ckptcore.copy_steps(GOLDEN / name, between)
    assert first.steps
    assert not first.skipped
    again = ckptcore.copy_steps(GOLDEN / name, between)
    assert again.skipped == tuple(first.steps)
    ckptcore.copy_steps(between, tmp_path / "copy")
    assert ckptcore.CheckpointReader(tmp_path / "copy").steps == ckptcore.CheckpointReader(GOLDEN / name).steps
    with ocp.CheckpointManager(tmp_path / "copy") as manager:
        assert manager.latest_step() == max(first.steps)
