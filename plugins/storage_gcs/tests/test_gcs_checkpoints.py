"""Checkpoints in GCS are saved, loaded, replaced and deleted, also as steps of a run. Tested on both servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest
from ckptcore_gcs_server import Request, Response, StrictGcs
from ckptcore_testing.gcs_servers import GcsServer

import ckptcore
from ckptcore import policies

pytestmark = pytest.mark.system

Place: TypeAlias = tuple[str, ckptcore.Context]


@pytest.fixture(params=["strict", "fake_gcs_server"])
def place(request: pytest.FixtureRequest) -> Place:
    """The URL of an empty bucket, with the Context for its server."""
    server: GcsServer = request.getfixturevalue(request.param)
    context = ckptcore.Context(storage={"gs": {**server.options, "part_bytes": 5 << 20}})
    return f"gs://{server.create_bucket()}", context


@pytest.mark.parametrize(
    "layout",
    ["safetensors", "dcp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ocdbt", "zarr3", "zarr"))],
)
def test_a_checkpoint_comes_back(place: Place, layout: str) -> None:
    bucket, context = place
    location = f"{bucket}/run/step_1"
    state = {"w": np.arange(4_000_000, dtype=np.float32).reshape(2000, 2000), "b": np.ones(3), "step": 7}
    ckptcore.save(location, state, layout=layout, context=context)
    loaded = ckptcore.load(location, context=context)
    np.testing.assert_array_equal(loaded["w"], state["w"])
    assert loaded["step"] == 7
    with pytest.raises(ckptcore.errors.CheckpointExistsError):
        ckptcore.save(location, state, layout=layout, context=context)
    assert ckptcore.verify(location, context=context).ok
    ckptcore.delete(location, context=context)
    with pytest.raises(ckptcore.errors.CheckpointNotFoundError):
        ckptcore.load(location, context=context)


def test_steps_of_a_run(place: Place) -> None:
    bucket, context = place
    policy = policies.LatestN(2)
    with ckptcore.Checkpointer(f"{bucket}/run", preservation_policy=policy, context=context) as steps:
        for number in range(4):
            steps.save(number, {"w": np.full(10, number)})
        steps.wait()
        assert steps.latest == 3
        np.testing.assert_array_equal(steps.load()["w"], np.full(10, 3))
    with ckptcore.CheckpointReader(f"{bucket}/run", context=context) as reader:
        assert list(reader.steps) == [2, 3]


def test_a_save_succeeds_if_answers_are_lost(gcs: StrictGcs) -> None:
    """The answer to each request that changes data is lost once."""
    context = ckptcore.Context(storage={"gs": {"endpoint": gcs.url, "anonymous": True, "part_bytes": 5 << 20}})
    state = {"w": np.arange(3_000_000, dtype=np.float32), "step": 1}
    ckptcore.save("gs://bucket/counted", state, context=context)
    changes = sum(not request.startswith(("GET", "HEAD")) for request in gcs.requests)
    assert changes > 3
    for lost in range(changes):
        seen = 0

        def lose(request: Request, serve: Callable[[Request], Response], lost: int = lost) -> Response | None:
            nonlocal seen
            answer = serve(request)
            if request.method in ("GET", "HEAD"):
                return answer
            seen += 1
            return None if seen == lost + 1 else answer

        gcs.intercept = lose
        location = f"gs://bucket/lost-{lost}"
        ckptcore.save(location, state, context=context)
        gcs.intercept = None
        np.testing.assert_array_equal(ckptcore.load(location, context=context)["w"], state["w"])
        with pytest.raises(ckptcore.errors.CheckpointExistsError):
            ckptcore.save(location, state, context=context)
