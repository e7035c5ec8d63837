"""Remedies in the errors of PyTorch states. Each test follows the remedy, and checks the loaded values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptcore_testing.trees import same_value
from ckptcore_torch.named_optimizers import NamedOptimizer
from ckptcore_transforms import Rename
from torch import nn

import ckptcore
from ckptcore import PLACEHOLDER
from ckptcore.errors import CheckpointError

VALUES = torch.arange(6.0).reshape(2, 3)


def refused(call: Callable[[], object], *texts: str) -> str:
    """Assert that the call raises an error with these texts. Return the message."""
    with pytest.raises(CheckpointError) as caught:
        call()
    for text in texts:
        assert text in str(caught.value), str(caught.value)
    return str(caught.value)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Run an optimizer step with gradients that differ between parameters."""
    for number, parameter in enumerate(model.parameters(), 1):
        parameter.grad = torch.full_like(parameter, float(number))
    optimizer.step()


# --- tensors ----------------------------------------------------------------------------------------------------------


def test_meta_and_fake_tensors(tmp_path: Path) -> None:
    meta = torch.empty(2, 3, device="meta")
    refused(lambda: ckptcore.save(tmp_path / "c", {"w": meta}), "only be used in an abstract tree; save the real")
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(2, 3)
    refused(lambda: ckptcore.save(tmp_path / "c", {"w": fake}), "save the real tensor")
    ckptcore.save(tmp_path / "c", {"w": VALUES})
    for abstract in (meta, fake):
        assert same_value(ckptcore.load(tmp_path / "c", {"w": abstract}), {"w": VALUES})


def test_lazy_modules(tmp_path: Path) -> None:
    lazy = nn.LazyLinear(2)
    refused(lambda: ckptcore.save(tmp_path / "c", {"model": lazy}), "call the module once, then save it or load into")
    lazy(torch.ones(1, 3))
    ckptcore.save(tmp_path / "c", {"model": lazy})
    other = nn.LazyLinear(2)
    other(torch.ones(1, 3))
    ckptcore.load_into(tmp_path / "c", {"model": other})
    assert same_value(dict(other.state_dict()), dict(lazy.state_dict()))


def test_freed_storages(tmp_path: Path) -> None:
    freed = VALUES.clone()
    freed.untyped_storage().resize_(0)
    refused(lambda: ckptcore.save(tmp_path / "c", {"w": freed}), "gather the parameters before saving them")
    ckptcore.save(tmp_path / "c", {"w": VALUES})
    refused(lambda: ckptcore.load_into(tmp_path / "c", {"w": freed}), "gather the parameters before loading into them")
    freed.untyped_storage().resize_(24)  # restores the storage, as a gather does
    ckptcore.load_into(tmp_path / "c", {"w": freed})
    assert same_value(freed, VALUES)


def test_shapes_and_kinds(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": VALUES, "text": "a"})
    wrong = {"w": torch.zeros(3), "text": torch.zeros(2)}
    text = refused(lambda: ckptcore.load(tmp_path / "c", wrong), "w: shape:", "metadata(location).abstract")
    assert "matching" not in text
    loaded = ckptcore.load(tmp_path / "c", {"w": torch.zeros(2, 3), "text": ""})
    assert same_value(loaded, {"w": VALUES, "text": "a"})
    stored: Any = ckptcore.metadata(tmp_path / "c").abstract
    assert same_value(ckptcore.load(tmp_path / "c", {**stored, "w": torch.zeros(2, 3)}), {"w": VALUES, "text": "a"})


def test_dtypes_that_the_other_framework_lacks(tmp_path: Path) -> None:
    complex_values = torch.complex(VALUES, VALUES)
    ckptcore.save(tmp_path / "c", {"w": complex_values})
    refused(lambda: ckptcore.load(tmp_path / "c", {"w": torch.zeros(2, 3)}), "no cast from complex64 to float32")
    assert same_value(ckptcore.load(tmp_path / "c", {"w": torch.zeros(2, 3, dtype=torch.complex64)})["w"].real, VALUES)


# --- modules ----------------------------------------------------------------------------------------------------------


class Expanded(nn.Module):
    """A module with a buffer. The elements of the buffer share memory, unless the buffer is a copy."""

    def __init__(self, *, copied: bool) -> None:
        super().__init__()
        mask = torch.ones(1, 3).expand(2, 3)
        self.register_buffer("mask", mask.contiguous() if copied else mask)


def test_expanded_buffers(tmp_path: Path) -> None:
    saved = Expanded(copied=False)
    ckptcore.save(tmp_path / "c", {"model": saved})
    refused(lambda: ckptcore.load_into(tmp_path / "c", {"model": saved}), "register_buffer(name, tensor.contiguous())")
    copied = Expanded(copied=True)
    copied.mask.zero_()  # type: ignore[operator]  # a tensor
    ckptcore.load_into(tmp_path / "c", {"model": copied})
    assert same_value(copied.mask, torch.ones(2, 3))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_state_dicts_of_modules_in_other_wrappers(tmp_path: Path) -> None:
    saved, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    wrapped: Any = torch.compile(saved)
    ckptcore.save(tmp_path / "c", dict(wrapped.state_dict()))
    refused(lambda: ckptcore.load_into(tmp_path / "c", plain), "Rename('_orig_mod.{rest...}', '{rest}')")
    ckptcore.load_into(tmp_path / "c", plain, transforms=[Rename("_orig_mod.{rest...}", "{rest}")])
    assert same_value(dict(plain.state_dict()), dict(saved.state_dict()))
    same_wrappers: Any = torch.compile(nn.Linear(3, 2))
    ckptcore.load_into(tmp_path / "c", same_wrappers)
    assert same_value(dict(same_wrappers.state_dict()), dict(wrapped.state_dict()))


def test_modules_of_another_architecture(tmp_path: Path) -> None:
    saved = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    ckptcore.save(tmp_path / "c", {"model": saved})
    other = nn.Sequential(nn.Linear(3, 2))
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    refused(lambda: ckptcore.load_into(tmp_path / "c", {"model": other}), "1.weight")
    assert same_value(dict(other.state_dict()), before)
    same = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    ckptcore.load_into(tmp_path / "c", {"model": same})
    assert same_value(dict(same.state_dict()), dict(saved.state_dict()))


# --- optimizers -------------------------------------------------------------------------------------------------------


def trained(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model after one step, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    stepped(model, optimizer)
    return model, optimizer


def test_an_optimizer_on_meta(tmp_path: Path) -> None:
    model, optimizer = trained()
    ckptcore.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    with torch.device("meta"):
        new = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    both = {"model": new, "optimizer": torch.optim.AdamW(new.parameters())}
    refused(lambda: ckptcore.load_into(tmp_path / "c", both), "load the model first, create the optimizer with its new")
    ckptcore.load_into(tmp_path / "c", {"model": new, "optimizer": PLACEHOLDER})
    created = torch.optim.AdamW(new.parameters())
    ckptcore.load_into(tmp_path / "c", {"model": PLACEHOLDER, "optimizer": created})
    assert same_value(created.state_dict(), optimizer.state_dict())
    for pair in ((model, optimizer), (new, created)):
        stepped(*pair)
    assert same_value(dict(new.state_dict()), dict(model.state_dict()))


def test_an_optimizer_with_other_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.named_parameters())
    stepped(model, optimizer)
    ckptcore.save(tmp_path / "c", {"optimizer": optimizer})
    other = torch.optim.AdamW([(f"renamed.{name}", value) for name, value in model.named_parameters()])
    refused(lambda: ckptcore.load_into(tmp_path / "c", {"optimizer": other}), "create it with model.parameters()")
    again = torch.optim.AdamW(model.parameters())
    ckptcore.load_into(tmp_path / "c", {"optimizer": again})
    assert same_value(again.state_dict()["state"], optimizer.state_dict()["state"])


def test_states_by_name_and_by_number(tmp_path: Path) -> None:
    model, optimizer = trained()
    ckptcore.save(tmp_path / "named", {"optimizer": NamedOptimizer(model, optimizer)})
    again = torch.optim.AdamW(model.parameters())
    refused(
        lambda: ckptcore.load_into(tmp_path / "named", {"optimizer": again}), "named_optimizers.NamedOptimizer(model,"
    )
    ckptcore.load_into(tmp_path / "named", {"optimizer": NamedOptimizer(model, again)})
    assert same_value(again.state_dict(), optimizer.state_dict())


def test_optimizers_that_have_no_names(tmp_path: Path) -> None:
    model, _ = trained()
    other = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()])
    for parameter in (*model.parameters(), *other.parameters()):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    refused(
        lambda: ckptcore.save(tmp_path / "c", {"optimizer": NamedOptimizer(model, optimizer)}),
        "pass the right model, or save the optimizer itself",
    )
    whole = nn.ModuleList([model, other])
    for name, saved in (("right", NamedOptimizer(whole, optimizer)), ("itself", optimizer)):
        ckptcore.save(tmp_path / name, {"optimizer": saved})
        again = torch.optim.AdamW(whole.parameters())
        into = NamedOptimizer(whole, again) if name == "right" else again
        ckptcore.load_into(tmp_path / name, {"optimizer": into})
        assert same_value(again.state_dict(), optimizer.state_dict())


def test_optimizers_that_share_a_parameter(tmp_path: Path) -> None:
    model, first = trained()
    second = torch.optim.SGD(model.parameters(), momentum=0.9)
    stepped(model, second)
    refused(
        lambda: ckptcore.save(tmp_path / "c", {"o": NamedOptimizer(model, first, second)}),
        "save each optimizer in a separate NamedOptimizer",
    )
    ckptcore.save(tmp_path / "c", {"a": NamedOptimizer(model, first), "b": NamedOptimizer(model, second)})
    again = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), momentum=0.9)
    ckptcore.load_into(tmp_path / "c", {"a": NamedOptimizer(model, again[0]), "b": NamedOptimizer(model, again[1])})
    assert same_value(again[0].state_dict(), first.state_dict())
    assert same_value(again[1].state_dict(), second.state_dict())


def test_groups_with_other_options(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))

    def in_groups() -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters()}])

    optimizer = in_groups()
    stepped(model, optimizer)
    ckptcore.save(tmp_path / "c", {"optimizer": NamedOptimizer(model, optimizer)})
    single_group = torch.optim.AdamW(model.parameters())
    refused(
        lambda: ckptcore.load_into(tmp_path / "c", {"optimizer": NamedOptimizer(model, single_group)}),
        "0.weight and 1.weight were saved with different options (lr 0.1 and 0.001)",
        "use the same groups as when the optimizer was saved",
    )
    assert not single_group.state
    again = in_groups()
    ckptcore.load_into(tmp_path / "c", {"optimizer": NamedOptimizer(model, again)})
    assert same_value(again.state_dict(), optimizer.state_dict())


def test_optimizers_of_another_model(tmp_path: Path) -> None:
    model, optimizer = trained()
    ckptcore.save(tmp_path / "c", {"optimizer": NamedOptimizer(model, optimizer)})
    other = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1), nn.Linear(1, 1))
    created = torch.optim.AdamW(other.parameters())
    text = refused(lambda: ckptcore.load_into(tmp_path / "c", {"optimizer": NamedOptimizer(other, created)}))
    assert not created.state
    assert "optimizer" in text
    same_model, _ = trained()
    again = torch.optim.AdamW(same_model.parameters())
    ckptcore.load_into(tmp_path / "c", {"optimizer": NamedOptimizer(same_model, again)})
    assert same_value(again.state_dict(), optimizer.state_dict())


class WithCode(nn.Module):
    """A module with a function as its extra state, which cannot be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.extra: object = print

    def get_extra_state(self) -> object:
        """Return the extra state."""
        return self.extra

    def set_extra_state(self, state: object) -> None:
        """Replace the extra state."""
        self.extra = state


def test_code_in_a_state(tmp_path: Path) -> None:
    model = WithCode()
    refused(lambda: ckptcore.save(tmp_path / "c", {"model": model}), "_extra_state", "code is not saved, remove it")
    model.extra = {"scale": 2.0}
    ckptcore.save(tmp_path / "c", {"model": model})
    other = WithCode()
    other.extra = {"scale": 0.0}
    ckptcore.load_into(tmp_path / "c", {"model": other})
    assert other.extra == {"scale": 2.0}
    assert same_value(dict(other.inner.state_dict()), dict(model.inner.state_dict()))


# --- directories ------------------------------------------------------------------------------------------------------


def test_a_directory_of_deepspeed(tmp_path: Path) -> None:
    """Files of a directory without partitions of weights load one by one."""
    step = tmp_path / "run" / "global_step10"
    step.mkdir(parents=True)
    (tmp_path / "run" / "latest").write_text("global_step10")
    files = {
        "mp_rank_00_model_states.pt": {"module": {"w": VALUES}},
        "zero_pp_rank_0_mp_rank_00_optim_states.pt": {"optimizer_state_dict": {"exp_avg": VALUES}},
    }
    for name, content in files.items():
        torch.save(content, step / name)
    for location in (tmp_path / "run", step):
        text = "load one file by its own path"
        refused(lambda location=location: ckptcore.load(location), text)  # type: ignore[misc]  # binds the loop variable
    for name, content in files.items():
        assert same_value(ckptcore.load(step / name, framework="torch"), content)


class Counting(torch.optim.SGD):
    """An optimizer with an additional entry in its state dict."""

    seen = 0

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]  # libraries do this
        """Return the state, and the count."""
        return {**super().state_dict(), "seen": self.seen}

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state, and the count."""
        state = dict(state_dict)
        self.seen = state.pop("seen")
        super().load_state_dict(state)


def with_momentum(kind: type[torch.optim.SGD]) -> tuple[nn.Module, Any]:
    """Return a model after one step, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
    stepped(model, optimizer)
    return model, optimizer


def test_optimizers_with_entries_without_names(tmp_path: Path) -> None:
    model, optimizer = with_momentum(Counting)
    optimizer.seen = 7
    refused(
        lambda: ckptcore.save(tmp_path / "c", {"o": NamedOptimizer(model, optimizer)}),
        "the state dict of the Counting also has seen, which cannot be saved by names; save the optimizer itself",
    )
    ckptcore.save(tmp_path / "c", {"o": optimizer})
    _, again = with_momentum(Counting)
    ckptcore.load_into(tmp_path / "c", {"o": again})
    assert again.seen == 7 and same_value(again.state_dict(), optimizer.state_dict())


def test_optimizers_with_a_state_that_belongs_to_no_parameter(tmp_path: Path) -> None:
    model, optimizer = with_momentum(torch.optim.SGD)
    optimizer.state["weight"] = {"x": 1}
    refused(
        lambda: ckptcore.save(tmp_path / "c", {"o": NamedOptimizer(model, optimizer)}),
        "a state with the key 'weight', which is also the name of a parameter; rename one of them",
    )
    optimizer.state["other"] = optimizer.state.pop("weight")
    others = with_momentum(torch.optim.SGD)
    both = nn.ModuleList([model, others[0]])
    refused(
        lambda: ckptcore.save(tmp_path / "c", {"o": NamedOptimizer(both, optimizer, others[1])}),
        "which is not the name of a parameter; save that optimizer in a separate NamedOptimizer",
    )
    ckptcore.save(tmp_path / "c", {"a": NamedOptimizer(model, optimizer), "b": NamedOptimizer(*others)})
    new, more = with_momentum(torch.optim.SGD), with_momentum(torch.optim.SGD)
    new[1].state["other"] = {"x": 0}
    ckptcore.load_into(tmp_path / "c", {"a": NamedOptimizer(*new), "b": NamedOptimizer(*more)})
    assert new[1].state["other"] == {"x": 1}
    assert same_value(more[1].state_dict(), others[1].state_dict())
