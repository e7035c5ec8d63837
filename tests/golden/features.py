"""Contents of the golden checkpoints of features, and functions that save them. All use the built-in layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ckptcore_testing import ThreadJob
from ckptcore_testing.fixed_saves import fixed_saves
from ckptcore_tiers import NearTier, TieredDirectory

import ckptcore
from ckptcore import ArrayShard, Checkpointer, ShardedArray
from ckptcore.commit.root import Claim
from ckptcore.commit.root_json import encode_claim
from ckptcore.context import JobOptions, ReplicaOptions
from ckptcore.model import Box
from ckptcore.policies import SpecificSteps
from ckptcore.protocols import Coordinator
from tests.golden.states import GOLDEN_PROCESSES, golden_composite, golden_state, golden_update

METADATA = {"made for": "tests/golden"}
_QUICK = ckptcore.Context(durability="none")


def _in_job(save: Callable[[ckptcore.Context, int], object], size: int = GOLDEN_PROCESSES) -> None:
    def run(coordinator: Coordinator) -> None:
        save(dataclasses.replace(_QUICK, job=JobOptions(coordinator=coordinator)), coordinator.rank)

    ThreadJob(size).run(run)


def sharded_state(rank: int) -> dict[str, Any]:
    """Return the state of a rank: its rows of an array, an array of all ranks, and a leaf of this rank alone."""
    shard = ArrayShard(Box((2 * rank, 0), (2 * rank + 2, 3)), np.arange(6, dtype=np.float32).reshape(2, 3) + 6 * rank)
    own = {f"of rank {rank}": np.full(2, rank, np.int16)}
    return {"rows": ShardedArray((4, 3), np.float32, [shard]), "shared": np.arange(5, dtype=np.int64), "own": own}


def parts_state() -> dict[str, Any]:
    """Return a state with names too long for the root."""
    return {f"{number:03d} {'long name ' * 30}": np.full(2, number, np.int16) for number in range(900)}


def sessions() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the states of two sessions of a partial save."""
    return {"a": np.arange(4, dtype=np.float32), "step": 3}, {"b": {"c": np.ones((2, 2), np.int8)}}


def host_state(rank: int) -> dict[str, Any]:
    """Return the state of a rank: its rows of an array, and an array of all ranks."""
    shard = ArrayShard(Box((2 * rank, 0), (2 * rank + 2, 3)), np.full((2, 3), rank, np.float32))
    return {
        "rows": ShardedArray((4, 3), np.float32, [shard]),
        "weight": np.arange(192, dtype=np.float32).reshape(64, 3),
    }


def _save_tree(at: Path) -> None:
    ckptcore.save(at, golden_state(), metadata=METADATA, context=_QUICK)


def _save_several_files(at: Path) -> None:
    layout = ckptcore.SafetensorsLayout(max_file_bytes=1000)
    ckptcore.save(at, golden_state(), layout=layout, metadata=METADATA, context=_QUICK)


def _save_parts(at: Path) -> None:
    ckptcore.save(at, parts_state(), metadata={**METADATA, "long": "ä" * 50_000}, context=_QUICK)


def _save_sharded(at: Path) -> None:
    _in_job(lambda context, rank: ckptcore.save(at, sharded_state(rank), metadata=METADATA, context=context))


def _save_composite(at: Path) -> None:
    _in_job(
        lambda context, rank: ckptcore.save_checkpointables(
            at, golden_composite(rank), metadata=METADATA, context=context
        )
    )


def _save_update(at: Path) -> None:
    ckptcore.save(at, golden_update(), strategy=ckptcore.Update(at.parent / "tree"), metadata=METADATA, context=_QUICK)


def _save_export(at: Path) -> None:
    export = ckptcore.Export(location=at / "weights", subtree="model")
    state = {"model": {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}, "step": 7}
    ckptcore.save(at, state, metadata=METADATA, strategy=ckptcore.WithExports([export]), context=_QUICK)


def _save_step(at: Path) -> None:
    """Save a step of a run with metrics and progress."""
    with Checkpointer(at, context=_QUICK) as run:
        run.save(3, {"w": np.arange(3, dtype=np.int32)}, metrics={"loss": 0.5, "bad": float("nan")}, metadata=METADATA)


def _save_partial(at: Path) -> None:
    """Save one complete session without `finalize`."""
    ckptcore.partial(at / "c", context=_QUICK).save(sessions()[0])


def _save_finalized(at: Path) -> None:
    for state in sessions():
        ckptcore.partial(at, context=_QUICK).save(state)
    ckptcore.partial(at, context=_QUICK).finalize(metadata=METADATA)


def _save_hosts(at: Path) -> None:
    """Save a step on the disks of two hosts with one process each. Each host has copies of the data of the other."""

    def save(context: ckptcore.Context, rank: int) -> None:
        near = NearTier(str(at / f"host-{rank}"), seen_by="host", upload_policy=SpecificSteps([]), close_seconds=60.0)
        job = dataclasses.replace(context.job, replicas=ReplicaOptions(piece_bytes=64))
        context = dataclasses.replace(context, job=job)
        with Checkpointer(TieredDirectory(near, str(at / "far")), context=context) as run:
            run.save(1, host_state(rank))
            run.wait()

    _in_job(save)


def _save_claim(at: Path) -> None:
    """Save the remains of a failed save on an object store."""
    at.mkdir()
    (at / "checkpoint.json").write_bytes(encode_claim(Claim("0123456789abcdef", "2026-01-02T03:04:05.678+00:00")))


FEATURES: Mapping[str, Callable[[Path], None]] = {
    "tree": _save_tree,
    "several-files": _save_several_files,
    "parts": _save_parts,
    "sharded": _save_sharded,
    "composite": _save_composite,
    "update": _save_update,
    "export": _save_export,
    "step": _save_step,
    "partial": _save_partial,
    "finalized": _save_finalized,
    "hosts": _save_hosts,
    "claim": _save_claim,
}
"""By the name of its directory, how a golden checkpoint is saved."""


def save_feature(name: str, directory: Path) -> None:
    """Save a golden checkpoint into a directory, with fixed save ids and times. Also save the base of an update."""
    if name == "update" and not (directory / "tree").exists():
        save_feature("tree", directory)
    with fixed_saves(16 * list(FEATURES).index(name) + 1):
        FEATURES[name](directory / name)
