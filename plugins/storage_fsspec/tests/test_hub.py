"""Repositories of the Hugging Face Hub are loaded by their URL. Saving to them is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import numpy as np
import pytest
from packaging.version import Version
from safetensors.numpy import save_file

import ckptcore
from ckptcore.errors import CheckpointNotFoundError, StoragePermissionError
from ckptcore.plugins import installed_plugins
from ckptcore.protocols import StorageOptions
from plugins.storage_fsspec.tests.hub_server import HubHandler
from plugins.storage_fsspec.tests.web_servers import serve_directory

needs_newer_hub = pytest.mark.skipif(
    Version(huggingface_hub.__version__) < Version("2"), reason="an older huggingface_hub"
)

WEIGHTS = {
    "model.embed.weight": np.arange(60_000, dtype=np.float32).reshape(200, 300),
    "model.norm.weight": np.ones(300, np.float16),
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model in two files with an index, as `transformers` writes it."""
    files = {}
    for number, (name, array) in enumerate(WEIGHTS.items(), 1):
        file = f"model-{number:05}-of-{len(WEIGHTS):05}.safetensors"
        save_file({name: array}, tmp_path / file, metadata={"format": "pt"})
        files[name] = file
    size = sum(array.nbytes for array in WEIGHTS.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text('{"model_type": "toy"}')
    (tmp_path / "README.md").write_text("# A model")
    return tmp_path


@pytest.fixture
def context(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ckptcore.Context]:
    """A Context for a local hub, because tests cannot reach the real one."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with serve_directory(repository, HubHandler) as (url, _):
        yield ckptcore.Context(storage={"hf": {"endpoint": url, "token": False}})


def test_a_repository_loads(context: ckptcore.Context) -> None:
    loaded = ckptcore.load("hf://team/model", context=context)
    assert loaded.keys() == WEIGHTS.keys()
    for name, array in WEIGHTS.items():
        assert np.array_equal(loaded[name], array) and loaded[name].dtype == array.dtype


def test_one_file_and_a_revision_load(context: ckptcore.Context) -> None:
    loaded = ckptcore.load("hf://team/model@main/model-00002-of-00002.safetensors", context=context)
    assert loaded["model.norm.weight"].tolist() == [1.0] * 300


def test_a_checkpoint_of_ours_loads(context: ckptcore.Context, repository: Path) -> None:
    ckptcore.save(repository / "checkpoints" / "step_7", {"w": np.arange(5), "step": 7})
    location = "hf://team/model/checkpoints/step_7"
    assert ckptcore.load(location, context=context)["step"] == 7
    assert ckptcore.verify(location, context=context).ok


@needs_newer_hub
def test_the_error_for_missing_repositories_and_paths(context: ckptcore.Context) -> None:
    for location in ("hf://team/model/nothing", "hf://team/other"):
        with pytest.raises(CheckpointNotFoundError):
            ckptcore.load(location, context=context)


def test_saving_is_refused(context: ckptcore.Context, repository: Path) -> None:
    before = sorted(repository.rglob("*"))
    with pytest.raises(StoragePermissionError, match="read-only"):
        ckptcore.save("hf://team/model/step_1", {"w": np.ones(3)}, context=context)
    assert sorted(repository.rglob("*")) == before


@needs_newer_hub
def test_a_checkpoint_in_a_bucket_loads(context: ckptcore.Context, repository: Path) -> None:
    ckptcore.save(repository / "step_1", {"w": np.arange(10), "step": 1})
    loaded = ckptcore.load("hf://buckets/team/box/step_1", context=context)
    assert loaded["step"] == 1
    np.testing.assert_array_equal(loaded["w"], np.arange(10))
    assert ckptcore.load("hf://buckets/team/box", context=context).keys() == WEIGHTS.keys()


@pytest.mark.parametrize("scheme", ["hf", "fsspec+hf"])
def test_the_error_for_a_write_names_the_s3_gateway(scheme: str, context: ckptcore.Context) -> None:
    storage = installed_plugins().storage(scheme)(f"{scheme}://buckets/team/box/run", StorageOptions(config={}))
    with pytest.raises(StoragePermissionError, match=r"through the S3 gateway .* s3://box/\.\.\. .*s3\.hf\.co/team'"):
        storage.put("a", b"1")
