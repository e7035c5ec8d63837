"""Loads into new objects, whose tensors and inner objects exist only in the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ckptcore_transforms import Cast, Rename

import ckptcore
from ckptcore.errors import TreeMismatchError


class Averages:
    """An average of weights. Its shadow tensors are created by the first update."""

    def __init__(self) -> None:
        self.shadows: dict[str, torch.Tensor] = {}
        self.counts = np.zeros(0, np.int64)

    def state_dict(self) -> dict[str, Any]:
        return {"shadows": self.shadows, "counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadows, self.counts = state["shadows"], state["counts"]


@pytest.mark.brings("average of weights without shadows yet", "torch", "same")
@pytest.mark.parametrize("layout", ["zarr3", "ocdbt", "dcp", "safetensors"])
def test_tensors_of_a_new_object_are_tensors(tmp_path: Path, layout: str) -> None:
    trained = Averages()
    trained.shadows = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    trained.counts = np.arange(3)
    ckptcore.save(tmp_path / "c", {"average": trained}, layout=layout)
    fresh = Averages()
    ckptcore.load_into(tmp_path / "c", {"average": fresh})
    assert {name: type(shadow) for name, shadow in fresh.shadows.items()} == {"w": torch.Tensor, "b": torch.Tensor}
    assert all(torch.equal(fresh.shadows[name], shadow) for name, shadow in trained.shadows.items())
    assert type(fresh.counts) is np.ndarray
    assert fresh.counts.tolist() == [0, 1, 2]


class Inner:
    def __init__(self) -> None:
        self.value = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Outer:
    def __init__(self, inner: Inner | None) -> None:
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        return {"step": 1} if self.inner is None else {"step": 1, "inner": self.inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner = state.get("inner")


@pytest.mark.brings("object with `state_dict` in another one", "torch", "same")
@pytest.mark.brings("object with `state_dict` in another one that is `None` now", "torch", "refused")
def test_an_object_in_an_object_is_restored_into_the_live_one(tmp_path: Path) -> None:
    saved = Inner()
    saved.value = torch.ones(2)
    ckptcore.save(tmp_path / "c", {"outer": Outer(saved)})
    inner = Inner()
    target = Outer(inner)
    ckptcore.load_into(tmp_path / "c", {"outer": target})
    assert target.inner is inner
    assert inner.value.tolist() == [1, 1]
    with pytest.raises(TreeMismatchError, match=r"outer/inner .* is the state of a .*Inner, which the target does not"):
        ckptcore.load_into(tmp_path / "c", {"outer": Outer(None)})


@pytest.mark.brings("object with `state_dict` in the state of an optimizer", "torch", "same")
@pytest.mark.brings("object with `state_dict` in the state of an optimizer that lacks it now", "torch", "refused")
def test_an_object_in_an_optimizer(tmp_path: Path) -> None:
    def optimizer() -> tuple[torch.optim.Optimizer, torch.nn.Parameter, Inner]:
        parameter, inner = torch.nn.Parameter(torch.ones(2)), Inner()
        made = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        parameter.grad = torch.ones(2)
        made.step()
        made.state[parameter]["average"] = inner
        return made, parameter, inner

    saved, _, held = optimizer()
    held.value = torch.ones(2)
    ckptcore.save(tmp_path / "c", saved)
    target, parameter, inner = optimizer()
    ckptcore.load_into(tmp_path / "c", target)
    assert target.state[parameter]["average"] is inner
    assert inner.value.tolist() == [1, 1]
    with pytest.raises(TreeMismatchError, match="is the state of a"):
        ckptcore.load_into(tmp_path / "c", torch.optim.SGD([parameter], lr=0.1, momentum=0.9))


class Wrapper:
    """A wrapper that delegates to an optimizer, as in trainers."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


@pytest.mark.parametrize("layout", ["zarr3", "dcp", "torch.save"])
@pytest.mark.brings("optimizer in a wrapper", "torch", "same")
def test_an_optimizer_in_a_wrapper(tmp_path: Path, layout: str) -> None:
    def made() -> tuple[torch.nn.Parameter, Wrapper]:
        parameter = torch.nn.Parameter(torch.ones(3))
        return parameter, Wrapper(torch.optim.AdamW([parameter], lr=0.1))

    def step(parameter: torch.nn.Parameter, wrapper: Wrapper) -> None:
        parameter.grad = torch.arange(3.0)
        wrapper.optimizer.step()

    trained, fresh = made(), made()
    step(*trained)
    with torch.no_grad():
        fresh[0].copy_(trained[0])
    if layout == "torch.save":
        torch.save({"optimizer": trained[1].state_dict()}, tmp_path / "c")
    else:
        ckptcore.save(tmp_path / "c", {"optimizer": trained[1]}, layout=layout)
    ckptcore.load_into(tmp_path / "c", {"optimizer": fresh[1]})
    step(*trained)
    step(*fresh)
    assert torch.equal(trained[0], fresh[0])


@pytest.mark.brings("replay buffer that is new", "torch", "same")
def test_a_replay_buffer_and_an_average_model(tmp_path: Path) -> None:
    """The buffer has no tensors before its first use."""

    class Replay:
        def __init__(self) -> None:
            self.episodes: list[dict[str, torch.Tensor]] = []

        def state_dict(self) -> dict[str, Any]:
            return {"episodes": self.episodes, "full": len(self.episodes) > 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.episodes = state["episodes"]

    trained, fresh = Replay(), Replay()
    trained.episodes = [{"reward": torch.tensor(1.5), "seen": torch.arange(4)}, {"reward": torch.tensor(2.0)}]
    ckptcore.save(tmp_path / "c", {"replay": trained})
    ckptcore.load_into(tmp_path / "c", {"replay": fresh})
    assert [{name: type(tensor) for name, tensor in episode.items()} for episode in fresh.episodes] == [
        {"reward": torch.Tensor, "seen": torch.Tensor},
        {"reward": torch.Tensor},
    ]
    assert fresh.episodes[0]["seen"].tolist() == [0, 1, 2, 3]


def test_transforms_keep_the_framework_of_arrays(tmp_path: Path) -> None:
    trained, fresh = Averages(), Averages()
    trained.shadows = {"w": torch.ones(2, 3), "b": torch.zeros(2)}
    ckptcore.save(tmp_path / "c", {"average": trained})
    changes = [Cast("average/shadows/w", "float64"), Rename("average/{rest...}", "ema/{rest}")]
    ckptcore.load_into(tmp_path / "c", {"ema": fresh}, transforms=changes)
    assert [type(shadow) for shadow in fresh.shadows.values()] == [torch.Tensor, torch.Tensor]
    assert fresh.shadows["w"].dtype == torch.float64
