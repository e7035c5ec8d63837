"""Published weights load in other programs: tied arrays, and the metadata of files."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
import transformers
from ckptcore_testing import run_ranks
from safetensors.torch import load_file, load_model

import ckptcore
from ckptcore.errors import CheckpointError

FAST = ckptcore.Context(durability="none")


class Tied(torch.nn.Module):
    """A model with two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def _published(tmp_path: Path, layout: str = "dcp", *, tied: Any = "each", **options: Any) -> tuple[Tied, Path]:
    model = Tied()
    ckptcore.save(tmp_path / "source", {"model": model.state_dict(), "step": 1}, layout=layout, context=FAST)
    written = ckptcore.SafetensorsLayout(**options)
    ckptcore.copy(tmp_path / "source", tmp_path / "hf", layout=written, subtree="model", tied=tied, context=FAST)
    return model, tmp_path / "hf"


def _header_metadata(file: Path) -> dict[str, str]:
    with safetensors.safe_open(file, "pt") as reader:
        return dict(reader.metadata())


@pytest.mark.parametrize("layout", ["safetensors", "dcp", "zarr3", "ocdbt"])
def test_plain_loads_find_every_name_of_a_tied_array(layout: str, tmp_path: Path) -> None:
    model, published = _published(tmp_path, layout)
    tensors = load_file(published / "model.safetensors")
    assert set(tensors) == {"embed.weight", "head.weight"}
    loaded = Tied()
    loaded.load_state_dict(tensors)
    assert torch.equal(loaded.head.weight, model.head.weight)
    assert _header_metadata(published / "model.safetensors") == {"format": "pt"}
    assert ckptcore.verify(published).ok


def test_ckptcore_loads_the_names_as_one_array(tmp_path: Path) -> None:
    model, published = _published(tmp_path)
    loaded = ckptcore.load(published)
    assert loaded["head.weight"] is loaded["embed.weight"]
    assert np.array_equal(loaded["embed.weight"], model.embed.weight.detach().numpy())
    module = Tied()
    ckptcore.load_into(published, module.state_dict())
    assert torch.equal(module.embed.weight, model.embed.weight)
    ckptcore.copy(published, published.parent / "again", subtree=(), tied="once", context=FAST)
    assert set(load_file(published.parent / "again" / "model.safetensors")) == {"embed.weight"}


def test_tied_once_writes_the_same_names_as_save_model(tmp_path: Path) -> None:
    model, published = _published(tmp_path, tied="once")
    file = published / "model.safetensors"
    safetensors.torch.save_model(model, str(tmp_path / "theirs.safetensors"), {"format": "pt"})
    assert set(load_file(file)) == set(load_file(tmp_path / "theirs.safetensors")) == {"embed.weight"}
    assert _header_metadata(file) == _header_metadata(tmp_path / "theirs.safetensors")
    loaded = Tied()
    missing, unexpected = load_model(loaded, file)
    assert not missing and not unexpected
    assert loaded.head.weight is loaded.embed.weight and torch.equal(loaded.head.weight, model.head.weight)


def test_several_files_have_every_name_in_the_index(tmp_path: Path) -> None:
    _, published = _published(tmp_path, max_file_bytes=60, metadata={"by": "us"})
    tensors = {name: tensor for file in published.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert set(tensors) == {"embed.weight", "head.weight"}
    index = ckptcore.load(published / "model.safetensors.index.json")
    assert set(index) == {"embed.weight", "head.weight"}
    for file in published.glob("*.safetensors"):
        assert _header_metadata(file) == {"format": "pt", "by": "us"}


@pytest.mark.parametrize("tied", ["each", "once"])
def test_transformers_loads_a_model_with_tied_weights(tied: str, tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=4, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    config.save_pretrained(tmp_path / "config")
    ckptcore.save(tmp_path / "source", model.state_dict(), context=FAST)
    files = [tmp_path / "config" / "config.json"]
    ckptcore.copy(tmp_path / "source", tmp_path / "hf", subtree=(), tied=tied, files=files, context=FAST)  # type: ignore[call-overload]  # `tied` needs a literal type
    read: Any = transformers.GPT2LMHeadModel.from_pretrained
    loaded, report = read(tmp_path / "hf", output_loading_info=True, local_files_only=True)
    assert not any(report.values())
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("tied", [True, False])
def test_files_of_save_pretrained_load_into_a_model(tied: bool, tmp_path: Path) -> None:
    """If weights are tied, `save_pretrained` writes only the embedding."""
    config = transformers.LlamaConfig(
        vocab_size=7, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1
    )
    config.tie_word_embeddings = tied
    saved, target = transformers.LlamaForCausalLM(config), transformers.LlamaForCausalLM(config)
    saved.save_pretrained(tmp_path / "hf")
    assert ("lm_head.weight" in load_file(tmp_path / "hf" / "model.safetensors")) is not tied
    ckptcore.load_into(tmp_path / "hf", target)
    assert all(map(torch.equal, target.state_dict().values(), saved.state_dict().values()))
    assert (target.lm_head.weight is target.model.embed_tokens.weight) == tied


def test_metadata_replaces_the_default(tmp_path: Path) -> None:
    _, published = _published(tmp_path, metadata={"format": "mlx", "license": "größe"})
    assert _header_metadata(published / "model.safetensors") == {"format": "mlx", "license": "größe"}
    (published / "checkpoint.json").unlink()
    assert ckptcore.metadata(published).custom == {"format": "mlx", "license": "größe"}


def test_a_save_accepts_metadata(tmp_path: Path) -> None:
    layout = ckptcore.SafetensorsLayout(metadata={"by": "us", "b": "a name of the user's"})
    shared = np.arange(3)
    ckptcore.save(tmp_path / "c", {"a": shared, "b": shared}, layout=layout, context=FAST)
    # As in `save_model`, the user's metadata has priority over the entry for a tied array.
    assert _header_metadata(tmp_path / "c" / "model.safetensors") == {
        "by": "us",
        "b": "a name of the user's",
        "__ckptcore__": "1",
        "format": "pt",
    }
    assert ckptcore.load(tmp_path / "c")["b"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "metadata", [{"a": 1}, {1: "a"}, {"a": None}, {"DCP_SHARDING_INFO": "{}"}, {"__ckptcore__": ""}]
)
def test_invalid_metadata_is_refused(metadata: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"SafetensorsLayout\(metadata="):
        _published(tmp_path, metadata=metadata)
    assert not (tmp_path / "hf").exists()


def test_an_invalid_value_of_tied_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected 'each' or 'once'"):
        _published(tmp_path, tied="twice")


def test_a_job_has_the_same_metadata(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "source", {"a": np.ones(8), "b": np.ones(8)}, context=FAST)
    same, different = tmp_path / "same", tmp_path / "different"

    def work(rank: int, context: ckptcore.Context) -> None:
        layout = functools.partial(ckptcore.SafetensorsLayout, 64, "model")
        ckptcore.copy(tmp_path / "source", same, layout=layout({"by": "us"}), subtree=(), context=context)
        with pytest.raises(CheckpointError, match="other arguments"):
            by_rank = layout({"by": str(rank)})
            ckptcore.copy(tmp_path / "source", different, layout=by_rank, subtree=(), context=context)

    run_ranks(2, work, timeout_seconds=60, durability="none")
    assert [_header_metadata(file)["by"] for file in sorted(same.glob("*.safetensors"))] == ["us", "us"]
    assert not different.exists()
