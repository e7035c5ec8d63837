"""Runs that Orbax and Flax wrote. ckptcore recognizes the names of their steps, and continues the runs."""

import flax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.training import checkpoints
from orbax.checkpoint import path as ocp_path
from orbax.checkpoint import v1

import ckptcore
from ckptcore.errors import InvalidLocationError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Flax Checkpointing will soon be deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
]


def state(step):
    return {"params": {"w": jnp.full((2, 3), step, jnp.float32)}, "step": jnp.int32(step)}


def by_manager(run, **options):
    with ocp.CheckpointManager(run, options=ocp.CheckpointManagerOptions(**options)) as manager:
        for step in (50, 100):
            manager.save(step, args=ocp.args.StandardSave(state(step)))


def by_version_1(run, **options):
    names = ocp_path.step.standard_name_format(**options)
    with v1.training.Checkpointer(run, step_name_format=names) as checkpointer:
        for step in (50, 100):
            checkpointer.save(step, state(step))


def by_flax(run, orbax=False, **options):
    before = flax.config.flax_use_orbax_checkpointing
    flax.config.update("flax_use_orbax_checkpointing", orbax)
    try:
        for step in (50, 100):
            checkpoints.save_checkpoint(run, state(step), step, keep=3, **options)
    finally:
        flax.config.update("flax_use_orbax_checkpointing", before)


RUNS = {
    "CheckpointManager": lambda run: by_manager(run),
    "CheckpointManager(step_prefix='ppo_networks')": lambda run: by_manager(run, step_prefix="ppo_networks"),
    "CheckpointManager(step_prefix='model', step_format_fixed_length=8)": lambda run: by_manager(
        run, step_prefix="model", step_format_fixed_length=8
    ),
    "CheckpointManager(step_format_fixed_length=12)": lambda run: by_manager(run, step_format_fixed_length=12),
    "training.Checkpointer": lambda run: by_version_1(run),
    "training.Checkpointer with a prefix": lambda run: by_version_1(run, step_prefix="ppo_networks"),
    "flax.training.checkpoints": lambda run: by_flax(run),
    "flax.training.checkpoints, prefix='model_'": lambda run: by_flax(run, prefix="model_"),
    "flax.training.checkpoints, prefix=''": lambda run: by_flax(run, prefix=""),
    "flax.training.checkpoints with Orbax": lambda run: by_flax(run, orbax=True),
    "flax.training.checkpoints with Orbax, prefix='model_'": lambda run: by_flax(run, orbax=True, prefix="model_"),
}


@pytest.mark.parametrize(
    "writer",
    [
        pytest.param(
            writer,
            marks=pytest.mark.brings(f"run of `{writer}`", "flax" if "flax" in writer else "orbax-checkpoint", "same"),
        )
        for writer in RUNS
    ],
)
def test_a_run_is_seen_and_continues(tmp_path, writer):
    RUNS[writer](tmp_path / "run")
    assert ckptcore.CheckpointReader(tmp_path / "run").steps == (50, 100)
    with ckptcore.Checkpointer(tmp_path / "run") as run:
        assert run.latest == 100
        loaded = run.load()
        assert np.all(loaded["params"]["w"] == 100)
        run.save_blocking(run.latest + 1, loaded)
        assert np.all(run.load(50)["params"]["w"] == 50)
    with ckptcore.Checkpointer(tmp_path / "run", preservation_policy=ckptcore.policies.LatestN(1)) as run:
        assert run.steps == (50, 100, 101)
        run.save_blocking(102, run.load())
        run.wait()
        assert run.steps == (50, 100, 102)  # the policy does not delete steps of other software


@pytest.mark.brings("`checkpoint_0.5` of `flax.training.checkpoints`, named by a metric", "flax", "refused")
@pytest.mark.parametrize("orbax", [True, False])
@pytest.mark.parametrize("metrics", [(0.5, 1.5), (-0.25, 0.25)])
def test_names_by_a_metric_are_an_error(tmp_path, orbax, metrics):
    before = flax.config.flax_use_orbax_checkpointing
    flax.config.update("flax_use_orbax_checkpointing", orbax)
    try:
        for metric in metrics:
            checkpoints.save_checkpoint(tmp_path / "run", state(1), metric, keep=3)
    finally:
        flax.config.update("flax_use_orbax_checkpointing", before)
    with pytest.raises(InvalidLocationError, match="has no whole number, which a step needs"):
        ckptcore.Checkpointer(tmp_path / "run")


def test_a_step_of_orbax_is_not_a_directory_of_steps(tmp_path):
    by_manager(tmp_path / "run")
    with pytest.raises(InvalidLocationError, match="is a checkpoint itself"):
        ckptcore.Checkpointer(tmp_path / "run" / "100")
