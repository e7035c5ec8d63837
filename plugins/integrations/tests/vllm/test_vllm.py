"""The model loader for vLLM, tested in vLLM: the registry, model classes, and workers of tensor-parallel groups.

`make test-vllm` runs these tests in a separate environment, because vLLM requires other versions of libraries.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ckptcore_integrations import vllm as loader
from ckptcore_testing.servers import free_port

import ckptcore
from ckptcore.errors import CheckpointNotFoundError, CorruptCheckpointError, TreeMismatchError, UnknownPathError

WORKER = Path(__file__).with_name("worker.py")
SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
}


def models() -> dict[str, Any]:
    """Return small models with random weights. vLLM creates groups of experts only if the first model has experts."""
    torch.manual_seed(0)
    mixtral = transformers.MixtralConfig(num_key_value_heads=4, num_local_experts=4, **SIZES)
    llama = transformers.LlamaConfig(num_key_value_heads=2, **SIZES)
    qwen2 = transformers.Qwen2Config(num_key_value_heads=4, tie_word_embeddings=True, **SIZES)
    bert = transformers.BertConfig(**SIZES)
    return {
        "mixtral": transformers.MixtralForCausalLM(mixtral),
        "llama": transformers.LlamaForCausalLM(llama),
        "qwen2": transformers.Qwen2ForCausalLM(qwen2),
        "bert": transformers.BertModel(bert),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directory of each model: ``config`` as Hugging Face saves it, and ``checkpoint`` with the same weights."""
    directories = {}
    for name, model in models().items():
        directories[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(directories[name] / "config")
        weights = ckptcore.load(directories[name] / "config", framework="torch")
        ckptcore.save(directories[name] / "checkpoint", weights, layout="dcp")
    return directories


def run_workers(size: int, reads: str, directories: list[Path]) -> list[list[dict[str, Any]]]:
    """Load models in the workers of a tensor-parallel group. Return each worker's report for each model."""
    port = free_port()
    workers = []
    for rank in range(size):
        command = [sys.executable, str(WORKER), str(rank), str(size), str(port), reads, *map(str, directories)]
        workers.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    outputs = [worker.communicate(timeout=900) for worker in workers]
    for worker, (_, errors) in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, errors[-6000:]
    return [[json.loads(line) for line in output.splitlines() if line.startswith("{")] for output, _ in outputs]


@pytest.mark.parametrize(("size", "reads"), [(1, "broadcast"), (2, "all"), (2, "broadcast"), (4, "broadcast")])
def test_each_worker_gets_its_part(saved: dict[str, Path], size: int, reads: str) -> None:
    """The parameters equal those that vLLM's own loader loads, and the group reads each byte once."""
    reports = run_workers(size, reads, list(saved.values()))
    for number, (name, directory) in enumerate(saved.items()):
        assert [report[number]["different"] for report in reports] == [[]] * size, name
        if reads == "broadcast":
            stored = sum([file.stat().st_size for file in (directory / "checkpoint").glob("*.distcp")])
            assert sum([report[number]["read"] for report in reports]) <= 1.05 * stored + (1 << 20), name


class Served(torch.nn.Module):
    """A model with a `load_weights` like that of most models of vLLM."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))

    def load_weights(self, weights: Any) -> set[str]:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        parameters, loaded = dict(self.named_parameters()), set()
        for name, weight in weights:
            default_weight_loader(parameters[name], weight)
            loaded.add(name)
        return loaded


class ModelConfig:
    """The interface of vLLM's class that the loader calls."""

    quantization = None

    def __init__(self, model: Path) -> None:
        self.model = str(model)


class LoadConfig:
    """The interface of vLLM's class that the loader calls."""

    def __init__(self, **options: Any) -> None:
        self.model_loader_extra_config = options


def load(model: Any, location: Path, **options: Any) -> None:
    made = loader.CheckpointLoader(LoadConfig(**options))
    made.download_model(ModelConfig(location))
    made.load_weights(model, ModelConfig(location))


WEIGHTS = {"a": torch.arange(60.0).reshape(6, 10), "b": torch.ones(3)}


@pytest.mark.parametrize("layout", ["safetensors", "dcp", "ocdbt"])
def test_a_part_of_a_training_checkpoint_is_served(tmp_path: Path, layout: str) -> None:
    ckptcore.save(tmp_path / "1", {"model": WEIGHTS, "step": 100}, layout=layout)
    served = Served({"a": (6, 10), "b": (3,)})
    load(served, tmp_path, checkpoint=str(tmp_path / "1"), subtree="model")
    assert all(torch.equal(served.get_parameter(name), weight) for name, weight in WEIGHTS.items())


def test_errors(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "1", {"model": WEIGHTS, "step": 1})
    served = Served({"a": (6, 10), "b": (3,), "c": (2,)})
    with pytest.raises(ValueError, match=r"lacks weights of the model: c"):
        load(served, tmp_path / "1", subtree="model")
    with pytest.raises(ValueError, match="expected a dict with batch_bytes, checkpoint, reads, storage, subtree"):
        load(served, tmp_path / "1", threads=3)
    for wrong in ({"reads": "twice"}, {"batch_bytes": 0}, {"batch_bytes": True}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.*expected"):
            load(served, tmp_path / "1", **wrong)
    with pytest.raises(TypeError, match="subtree=1 is not text"):
        load(served, tmp_path / "1", subtree=1)
    with pytest.raises(TreeMismatchError, match="is one leaf"):
        load(served, tmp_path / "1", subtree="step")
    with pytest.raises(UnknownPathError):
        load(served, tmp_path / "1", subtree="missing")
    with pytest.raises(CheckpointNotFoundError):
        load(served, tmp_path / "2")
    data = tmp_path / "1" / "model.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    with pytest.raises(CorruptCheckpointError):
        load(served, tmp_path / "1", subtree="model")


def test_a_checkpoint_that_is_replaced_during_the_load_is_refused(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "1", WEIGHTS)
    served = Served({"a": (6, 10), "b": (3,)})
    copy = served.load_weights

    def replace_too(weights: Any) -> set[str]:
        loaded = copy(weights)
        ckptcore.save(tmp_path / "1", WEIGHTS, overwrite=True)
        return loaded

    served.load_weights = replace_too  # type: ignore[method-assign]
    with pytest.raises(CorruptCheckpointError, match="was replaced while it was loaded"):
        load(served, tmp_path / "1")
