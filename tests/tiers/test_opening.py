"""Opening a run of two tiers: the steps of the far tier are looked at together, and one does not block the others."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import pytest
from ckptcore_tiers import NearTier, TieredDirectory

from ckptcore import Checkpointer
from ckptcore.policies import PreserveAll
from tests.checkpointer.runs import save_steps
from tests.tiers.far_stores import Meeting

STEPS = (1, 2, 3, 4)


@pytest.mark.parametrize("known", [(), STEPS], ids=["far", "near and far"])
def test_the_far_tier_is_asked_for_steps_together(known: Sequence[int], near: str) -> None:
    meeting, tier = Meeting(), NearTier(near, preservation_policy=PreserveAll())
    with Checkpointer(TieredDirectory(tier, "far://run"), context=meeting.context) as run:
        save_steps(run, STEPS)
    if not known:
        shutil.rmtree(near)
    meeting.left = 2 if known else 1  # which steps there are, and if they are those of the near tier
    with Checkpointer(TieredDirectory(tier, "far://run"), context=meeting.context) as run:
        assert run.steps == STEPS
    assert meeting.left == 0
