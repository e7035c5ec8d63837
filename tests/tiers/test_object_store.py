"""A far tier on a local S3 server. Steps that the near tier lost are loaded from it, and network faults lose none."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_s3.testing import DIALECT, S3Server, s3_server
from ckptcore_testing import (
    DeliverLater,
    FaultProxy,
    InterruptBefore,
    ProxiedRequest,
    RepeatLater,
    RequestFault,
    RequestPlan,
    SeededFaults,
    StoreDialect,
)
from ckptcore_tiers import NearTier, TieredDirectory

import ckptcore
from ckptcore import Checkpointer, CheckpointReader, Context
from ckptcore.policies import LatestN
from tests.checkpointer.runs import assert_is_step, save_steps

pytestmark = pytest.mark.system

_LARGE = 7 << 20
"""Bytes of an array that is uploaded in parts."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Start a server for this module alone."""
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


def _context(server: S3Server, **options: Any) -> Context:
    return Context(storage={"s3": {**server.options, "part_bytes": 5 << 20, **options}})


def test_steps_lost_from_the_near_tier_are_loaded_from_s3(tmp_path: Path, server: S3Server) -> None:
    far, context = f"s3://{server.create_bucket()}/run", _context(server)
    near = tmp_path / "near"
    with Checkpointer(
        tiers := TieredDirectory(NearTier(near, preservation_policy=LatestN(1)), far), context=context
    ) as run:
        save_steps(run, [1, 2, 3])
        tiers.wait_for_uploads(120)
        assert tiers.uploads.waiting == ()
    assert CheckpointReader(near).steps == (3,)
    shutil.rmtree(near)
    with Checkpointer(TieredDirectory(NearTier(near), far), context=context) as run:
        assert run.steps == (1, 2, 3)
        assert_is_step(run.load(), 3)
        save_steps(run, [4])
    reader = CheckpointReader(far, context=context)
    assert reader.steps == (1, 2, 3, 4)
    for step in reader.steps:
        assert_is_step(reader.load(step), step)
        assert ckptcore.verify(f"{far}/{step}", context=context).ok


class _FaultsAndOutage:
    """Random faults by a seed, and an outage between `begin` and `end`.

    Attributes:
        refused: released for each request during the outage.
    """

    def __init__(self, plan: RequestPlan) -> None:
        self._plan = plan
        self._away = threading.Event()
        self.refused = threading.Semaphore(0)

    def begin(self) -> None:
        """Make the service unavailable."""
        self._away.set()

    def end(self) -> None:
        """Make the service available."""
        self._away.clear()

    def faults(self, request: ProxiedRequest, dialect: StoreDialect) -> Sequence[RequestFault]:
        """See `RequestPlan`."""
        if self._away.is_set():
            self.refused.release()
            return (InterruptBefore(lambda: None),)
        return self._plan.faults(request, dialect)


def _large(step: int) -> dict[str, Any]:
    return {"w": np.full(_LARGE, step, np.uint8), "step": step}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_throttling_resets_and_an_outage_lose_no_step(tmp_path: Path, server: S3Server, seed: int) -> None:
    bucket = server.create_bucket()
    far, near = f"s3://{bucket}/run", tmp_path / "near"
    # Requests that are repeated or delivered late affect only commits, which have their own tests.
    plan = SeededFaults(seed, rate=0.15, most=60, spared=(RepeatLater, DeliverLater))
    weather = _FaultsAndOutage(plan)
    with FaultProxy(server.server.url, weather, dialect=DIALECT) as proxy:
        context = _context(server, endpoint=proxy.url, retries=3, first_wait=0.01)
        tier = NearTier(near, preservation_policy=LatestN(2), max_waiting=20)
        with Checkpointer(tiers := TieredDirectory(tier, far), context=context) as run:
            for step in range(1, 6):
                run.save(step, _large(step))
                run.wait()
            weather.begin()
            for step in range(6, 9):  # saves do not wait for the far tier
                run.save(step, _large(step))
                run.wait()
            for _ in range(4):  # a request and its three retries
                assert weather.refused.acquire(timeout=60)
            assert CheckpointReader(near).latest == 8
            weather.end()
            tiers.wait_for_uploads(300)
            assert tiers.uploads.skipped == () and tiers.uploads.failed == ()
    shutil.rmtree(near)
    plain = _context(server)
    reader = CheckpointReader(far, context=plain)
    assert reader.steps == tuple(range(1, 9))
    for step in reader.steps:
        assert (reader.load(step)["w"] == step).all()
    with Checkpointer(TieredDirectory(NearTier(near), far), context=plain) as run:
        assert run.load()["step"] == 8
