"""Checkpoints in S3: saved, loaded, replaced, deleted, in steps."""

from __future__ import annotations

import numpy as np
import pytest
from ckptcore_s3.testing import S3Server, server_kind

import ckptcore
from ckptcore import policies


@pytest.fixture
def bucket(ministack: S3Server) -> str:
    """An empty bucket."""
    return ministack.create_bucket()


@pytest.fixture
def context(ministack: S3Server) -> ckptcore.Context:
    """A Context with the credentials and the address of the server."""
    return ckptcore.Context(storage={"s3": {**ministack.options, "part_bytes": 5 << 20}})


@pytest.mark.parametrize("layout", ["safetensors", "ocdbt", "zarr3", "dcp"])
def test_a_checkpoint_comes_back(bucket: str, context: ckptcore.Context, layout: str) -> None:
    location = f"s3://{bucket}/run/step_1"
    state = {"w": np.arange(4_000_000, dtype=np.float32).reshape(2000, 2000), "b": np.ones(3), "step": 7}
    ckptcore.save(location, state, layout=layout, context=context)
    loaded = ckptcore.load(location, context=context)
    np.testing.assert_array_equal(loaded["w"], state["w"])
    assert loaded["step"] == 7
    with pytest.raises(ckptcore.errors.CheckpointExistsError):
        ckptcore.save(location, state, layout=layout, context=context)
    ckptcore.delete(location, context=context)
    with pytest.raises(ckptcore.errors.CheckpointNotFoundError):
        ckptcore.load(location, context=context)


@pytest.mark.lives(
    "S3-compatible services",
    "ministack; Ceph by `make test-ceph`",
    "saves, loads, runs",
    "no atomic replacement",
)
def test_steps_of_a_run(bucket: str, context: ckptcore.Context) -> None:
    policy = policies.LatestN(2)
    with ckptcore.Checkpointer(f"s3://{bucket}/run", preservation_policy=policy, context=context) as steps:
        for number in range(4):
            steps.save(number, {"w": np.full(10, number)})
        steps.wait()
        assert steps.latest == 3
        np.testing.assert_array_equal(steps.load()["w"], np.full(10, 3))
    with ckptcore.CheckpointReader(f"s3://{bucket}/run", context=context) as reader:
        assert list(reader.steps) == [2, 3]


def test_the_remedy_for_a_missing_bucket(ministack: S3Server, bucket: str, context: ckptcore.Context) -> None:
    other = f"{bucket}-other"

    def save(name: str) -> None:
        ckptcore.save(f"s3://{name}/run", {"w": np.ones(3)}, context=context)

    with pytest.raises(
        ckptcore.errors.BucketNotFoundError,
        match="other/run/.*Check the name of the bucket and the endpoint, or create",
    ):
        save(other)
    save(bucket)
    ministack.create_bucket(other)
    save(other)
    for name in (bucket, other):
        assert ckptcore.load(f"s3://{name}/run", context=context)["w"].tolist() == [1] * 3


def test_kinds_of_servers_for_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTCORE_S3_SERVER", "minio")
    with pytest.raises(ValueError, match="CKPTCORE_S3_SERVER='minio': expected one of ") as caught:
        server_kind()
    for kind in str(caught.value).partition("expected one of ")[2].split(", "):
        monkeypatch.setenv("CKPTCORE_S3_SERVER", kind)
        assert server_kind() == kind
