"""PyTorch's own rules for loading modules, parameters and tied tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptcore
from ckptcore.errors import TreeMismatchError


def test_load_hooks_of_a_module_run_after_a_load_in_place(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", torch.nn.Linear(2, 2))
    module = torch.nn.Linear(2, 2)
    calls: list[object] = []
    module.register_load_state_dict_post_hook(lambda *arguments: calls.append(arguments))
    pointer = module.weight.data_ptr()
    ckptcore.load_into(tmp_path / "c", module)
    assert len(calls) == 1 and module.weight.data_ptr() == pointer


def test_tied_leaves_are_built_separately_for_different_requests(tmp_path: Path) -> None:
    shared = torch.ones(3)
    ckptcore.save(tmp_path / "c", {"student": shared, "teacher": shared})
    asked = {
        "student": torch.nn.Parameter(torch.zeros(3)),
        "teacher": torch.nn.Parameter(torch.zeros(3), requires_grad=False),
    }
    loaded = ckptcore.load(tmp_path / "c", asked)
    assert loaded["student"].requires_grad and not loaded["teacher"].requires_grad


class Named(torch.nn.Parameter):
    pass


def test_a_loaded_parameter_of_a_subclass_can_be_trained(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"p": torch.ones(3)})
    loaded = ckptcore.load(tmp_path / "c", {"p": Named(torch.zeros(3))})["p"]
    assert type(loaded) is Named and loaded.is_leaf and loaded.requires_grad
    loaded.sum().backward()
    assert loaded.grad is not None
    torch.optim.SGD([loaded], lr=1.0).step()
    assert not loaded.detach().any()


class Tagged(torch.Tensor):
    tag: object


def test_tensors_over_one_memory_keep_their_attributes(tmp_path: Path) -> None:
    shared = torch.ones(3)
    state = [shared.as_subclass(Tagged) for _ in range(3)]
    for leaf, tag in zip(state, ("query", "key", "query"), strict=True):
        leaf.tag = tag
    ckptcore.save(tmp_path / "c", state)
    for request in (state, ckptcore.abstract(state)):
        loaded = ckptcore.load(tmp_path / "c", request)
        assert [leaf.tag for leaf in loaded] == ["query", "key", "query"] and loaded[0] is loaded[2]


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view])
def test_lazy_views_of_one_tensor_are_not_filled_as_tied(tmp_path: Path, view: Any) -> None:
    shared = torch.tensor([1 + 2j, 3 + 4j])
    ckptcore.save(tmp_path / "c", {"a": shared, "b": shared})
    target = torch.zeros_like(shared)
    with pytest.raises(TreeMismatchError, match="a and b are arrays that overlap"):
        ckptcore.load_into(tmp_path / "c", {"a": target, "b": view(target)})
    assert not target.any()
    ckptcore.load_into(tmp_path / "c", {"a": target, "b": target.numpy()})
    assert torch.equal(target, shared)


def test_tied_buffers_on_the_meta_device_get_the_loaded_values(tmp_path: Path) -> None:
    class Buffers(torch.nn.Module):
        def __init__(self, device: str) -> None:
            super().__init__()
            tensor = torch.arange(3.0, device=device)
            self.register_buffer("a", tensor, persistent=False)
            self.register_buffer("b", tensor)

    ckptcore.save(tmp_path / "c", Buffers("cpu"))
    module = Buffers("meta")
    ckptcore.load_into(tmp_path / "c", module)
    assert torch.equal(module.get_buffer("b"), torch.arange(3.0)) and module.get_buffer("a") is module.get_buffer("b")
