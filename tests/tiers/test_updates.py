"""Updates in a near tier. They are uploaded as whole checkpoints, because policies may never upload their bases."""

from __future__ import annotations

from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing.locations import new_place, objects_at
from ckptcore_testing.trees import same_value
from ckptcore_tiers import NearTier, TieredDirectory
from ckptcore_tools.copies.copying import copy_whole

import ckptcore
from ckptcore import Checkpointer, CheckpointReader
from ckptcore.policies import FixedInterval, LatestN

_STATE: dict[str, Any] = {"a": np.ones(4), "b": np.zeros(3), "n": 1}


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({}, LatestN(1)),
        ({}, LatestN(5)),
        ({"upload_policy": FixedInterval(2)}, LatestN(5)),
        ({"max_waiting": 1}, LatestN(5)),
    ],
)
def test_an_update_is_a_whole_checkpoint_in_the_far_tier(options: Any, policy: Any, tmp_path: Path) -> None:
    near, far = new_place("file", tmp_path), new_place("memory", tmp_path)
    ckptcore.save(f"{near}/1", _STATE)
    ckptcore.save(f"{near}/2", {"n": 2}, strategy=ckptcore.Update(f"{near}/1"))
    whole_steps = []
    for _ in range(2):
        with Checkpointer(TieredDirectory(NearTier(near, **options), far), preservation_policy=policy) as run:
            run.wait()
            assert run.load()["n"] == 2
        whole_steps.append(objects_at(f"{far}/2"))
    assert whole_steps[0] == whole_steps[1], "what was uploaded once is not uploaded again"
    for step in (2, 1):
        ckptcore.delete(f"{near}/{step}")
    if 1 in CheckpointReader(far).steps:
        ckptcore.delete(f"{far}/1")
    assert same_value(CheckpointReader(far).load(), {**_STATE, "n": 2})


def test_a_whole_copy_can_be_stopped(tmp_path: Path) -> None:
    run = new_place("memory", tmp_path)
    ckptcore.save(f"{run}/1", _STATE)
    ckptcore.save(f"{run}/2", {"n": 2}, strategy=ckptcore.Update(f"{run}/1"))

    def refuse() -> None:
        raise ZeroDivisionError

    with pytest.raises(CancelledError):
        copy_whole(f"{run}/2", f"{run}/3", ckptcore.Context(), is_stopped=lambda: True)
    with pytest.raises(ZeroDivisionError):
        copy_whole(f"{run}/2", f"{run}/3", ckptcore.Context(), before_commit=refuse)
    assert objects_at(f"{run}/3") == {}
    copy_whole(f"{run}/2", f"{run}/3", ckptcore.Context())
    assert same_value(ckptcore.load(f"{run}/3"), {**_STATE, "n": 2})
