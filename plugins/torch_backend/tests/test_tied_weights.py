"""Loads of files that contain tied weights under only one name, like those of `save_pretrained` of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

import ckptcore
from ckptcore import Matching
from ckptcore.errors import TreeMismatchError

EMBEDDING, HEAD = "model.embed.weight", "head.weight"


class LanguageModel(nn.Module):
    """A language model whose head and embedding share their weight, or have separate weights."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "layer": nn.Linear(3, 3)})
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.model["embed"].weight  # type: ignore[assignment]  # a Parameter


def save_pretrained(model: nn.Module, directory: Path, *, without: str = HEAD) -> Path:
    """Write a file as transformers does, with one name of each tied weight."""
    directory.mkdir()
    state = {name: held.contiguous() for name, held in model.state_dict().items() if name != without}
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    return directory


def same(first: nn.Module, second: nn.Module) -> bool:
    return all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))


@pytest.mark.parametrize("without", [HEAD, EMBEDDING])
def test_files_with_either_name_load(tmp_path: Path, without: str) -> None:
    saved, target = LanguageModel(), LanguageModel()
    directory = save_pretrained(saved, tmp_path / "hf", without=without)
    for location in (directory, directory / "model.safetensors"):
        target = LanguageModel()
        assert ckptcore.load_into(location, target) is target
        assert same(target, saved) and target.head.weight is target.get_parameter(EMBEDDING)
    with torch.device("meta"):
        target = LanguageModel()
    ckptcore.load_into(directory, target)
    assert same(target, saved) and target.head.weight is target.get_parameter(EMBEDDING)
    target = LanguageModel()
    target.load_state_dict(ckptcore.load(directory, target))
    assert same(target, saved)


@pytest.mark.parametrize("without", [HEAD, EMBEDDING])
def test_files_with_either_name_load_into_a_state_dict(tmp_path: Path, without: str) -> None:
    saved, target = LanguageModel(), LanguageModel()
    ckptcore.load_into(save_pretrained(saved, tmp_path / "hf", without=without), dict(target.state_dict()))
    assert same(target, saved)
    with pytest.raises(
        TreeMismatchError, match="missing"
    ):  # tensors on the meta device have no memory that could be tied
        ckptcore.load_into(tmp_path / "hf", dict(LanguageModel(tied=False).to("meta").state_dict()))


def test_a_model_with_separate_weights_is_refused(tmp_path: Path) -> None:
    """The weight that is not stored would stay random. The load allows this only with missing="keep"."""
    target = LanguageModel(tied=False)
    head, embedding = target.head.weight.clone(), target.get_parameter(EMBEDDING).clone()
    for without, lacking in ((HEAD, HEAD), (EMBEDDING, EMBEDDING)):
        directory = save_pretrained(LanguageModel(), tmp_path / lacking, without=without)
        for into in (target, dict(target.state_dict())):
            with pytest.raises(TreeMismatchError) as caught:
                ckptcore.load_into(directory, into)
            (difference,) = caught.value.differences
            assert difference.startswith(f"missing: ['{lacking}'] is not stored")
            assert f"['{lacking}'] would start again" in str(caught.value)
    assert torch.equal(target.head.weight, head) and torch.equal(target.get_parameter(EMBEDDING), embedding)
    ckptcore.load_into(tmp_path / HEAD, target, matching=Matching(missing="keep"))
    assert torch.equal(target.head.weight, head) and not torch.equal(target.get_parameter(EMBEDDING), embedding)


@pytest.mark.parametrize("form", ["ckptcore", "save_model"])
def test_files_that_record_ties_load_into_both_models(tmp_path: Path, form: str) -> None:
    saved: Any = LanguageModel()
    if form == "ckptcore":
        ckptcore.save(tmp_path / "c", saved)
    else:
        save_model(saved, str(tmp_path / "c.safetensors"))
    for tied in (True, False):
        target = LanguageModel(tied=tied)
        ckptcore.load_into(tmp_path / ("c" if form == "ckptcore" else "c.safetensors"), target)
        assert same(target, saved)
        assert (target.head.weight is target.get_parameter(EMBEDDING)) == tied


def test_two_stored_weights_are_refused_for_tied_weights(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", LanguageModel(tied=False))
    with pytest.raises(TreeMismatchError, match="one array in the target, but separate"):
        ckptcore.load_into(tmp_path / "c", LanguageModel())
