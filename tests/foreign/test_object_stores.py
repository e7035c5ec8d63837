"""Other programs on S3: they read checkpoints of ckptcore, and ckptcore reads theirs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import s3fs  # type: ignore[import-untyped]  # it has no types
import torch
from ckptcore_s3.testing import S3Server, s3_server
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

import ckptcore

pytestmark = pytest.mark.system

WEIGHTS = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)
CANNOT = (
    "Orbax 0.12.8 knows no S3: it gives tensorstore the path 's3:/bucket/...' as one of a local file "
    "(serialization/tensorstore_utils.py has a driver of its own for gs:// only)"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Start MiniStack."""
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def directory(server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """Return a directory on S3, and set the environment variables with which every program connects."""
    monkeypatch.chdir(tmp_path)  # Orbax creates a local directory named "s3:"
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()  # cached instances have settings of an earlier environment
    yield f"s3://{server.create_bucket()}/run"
    s3fs.S3FileSystem.clear_instance_cache()


def _tensors() -> dict[str, object]:
    return {"w": torch.from_numpy(WEIGHTS.copy()), "optimizer": {"step": torch.arange(5)}}


def _empty() -> dict[str, object]:
    return {"w": torch.zeros(64, 48), "optimizer": {"step": torch.zeros(5, dtype=torch.int64)}}


def _expect_tensors(loaded: dict[str, object]) -> None:
    assert isinstance(loaded["w"], torch.Tensor)
    assert torch.equal(loaded["w"], torch.from_numpy(WEIGHTS))
    assert loaded["optimizer"]["step"].tolist() == list(range(5))  # type: ignore[index]  # the value is a dict


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_torch_reads_checkpoints_of_ckptcore(directory: str) -> None:
    ckptcore.save(f"{directory}/ours", _tensors(), layout="dcp")
    target = _empty()
    state_dict_loader.load(target, storage_reader=FsspecReader(f"{directory}/ours"))
    _expect_tensors(target)


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_ckptcore_reads_a_checkpoint_of_torch(directory: str) -> None:
    state_dict_saver.save(_tensors(), storage_writer=FsspecWriter(f"{directory}/theirs"))
    _expect_tensors(ckptcore.load(f"{directory}/theirs", _empty()))
    assert ckptcore.metadata(f"{directory}/theirs").layout == "dcp"


def test_safetensors_and_ckptcore_read_each_other(directory: str) -> None:
    from safetensors.numpy import load, save

    files = s3fs.S3FileSystem()
    ckptcore.save(f"{directory}/ours", {"w": WEIGHTS})
    assert np.array_equal(load(files.cat_file(f"{directory}/ours/model.safetensors"))["w"], WEIGHTS)
    files.pipe_file(f"{directory}/theirs/model.safetensors", save({"w": WEIGHTS}))
    assert np.array_equal(ckptcore.load(f"{directory}/theirs")["w"], WEIGHTS)
    assert np.array_equal(ckptcore.load(f"{directory}/theirs/model.safetensors")["w"], WEIGHTS)


@pytest.mark.parametrize("layout", ["ocdbt", "zarr3", "zarr"])
def test_tensorstore_reads_checkpoints_of_ckptcore(directory: str, server: S3Server, layout: str) -> None:
    import tensorstore

    ckptcore.save(f"{directory}/ours", {"w": WEIGHTS}, layout=layout)
    bucket, _, path = directory.removeprefix("s3://").partition("/")
    store = {
        "driver": "s3",
        "bucket": bucket,
        "endpoint": server.server.url,
        "aws_region": "us-east-1",
        "aws_credentials": {"type": "environment"},
        "path": f"{path}/ours/{_item_directory(directory)}",
    }
    if layout == "ocdbt":
        kvstore = {"driver": "ocdbt", "base": store, "path": "w/"}
    else:
        kvstore = {**store, "path": f"{store['path']}w/"}
    array = tensorstore.open({"driver": "zarr" if layout == "zarr" else "zarr3", "kvstore": kvstore}).result()
    assert np.array_equal(array.read().result(), WEIGHTS)


def _item_directory(directory: str) -> str:
    """Return the directory in which Orbax stores the arrays of one tree."""
    names = s3fs.S3FileSystem().ls(f"{directory}/ours", detail=False)
    return "state/" if any(name.endswith("/state") for name in names) else ""


@pytest.mark.xfail(strict=True, raises=ValueError, reason=CANNOT)
def test_orbax_reads_checkpoints_of_ckptcore(directory: str) -> None:
    from orbax.checkpoint import v1  # type: ignore[import-untyped]  # it has no types

    ckptcore.save(f"{directory}/ours", {"w": WEIGHTS}, layout="ocdbt")
    assert np.array_equal(np.asarray(v1.load(f"{directory}/ours")["w"]), WEIGHTS)


@pytest.mark.xfail(strict=True, raises=ValueError, reason=CANNOT)
def test_ckptcore_reads_a_checkpoint_of_orbax(directory: str) -> None:
    import orbax.checkpoint as ocp  # type: ignore[import-untyped]  # it has no types

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(f"{directory}/theirs", {"w": WEIGHTS})
    assert np.array_equal(ckptcore.load(f"{directory}/theirs")["w"], WEIGHTS)
