"""`ckptcore.check` reports all parts of a state that cannot be saved or restored, before the training."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ckptcore_testing import ThreadJob

import ckptcore
from ckptcore import Context
from ckptcore.context import JobOptions
from ckptcore.errors import RankFailedError, UnsupportedLeafError


class Unready:
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("call setup() first")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Expanded(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1).expand(4))


def refused() -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    return {
        "model": model,
        "lock": threading.Lock(),
        "deep": [{"function": print}, (1, threading.Lock())],
        "keys": {("a", 1.5): 1},
        "meta": torch.empty(3, device="meta"),
        "masked": np.ma.masked_array([1, 2], [0, 1]),
        "loader": Unready(),
        "more": {"model": torch.nn.ModuleDict({"inner": Expanded()}), "w": np.ones(2)},
    }


PATHS = ("lock", "deep[0]/function", "deep[1][1]", "keys", "meta", "masked", "loader")


@pytest.mark.brings("lock, function, or float as a key, in `ckptcore.check`", "Python", "refused")
@pytest.mark.brings("masked array, in `ckptcore.check`", "numpy", "refused")
@pytest.mark.brings("tensor on the meta device, in `ckptcore.check`", "torch", "refused")
def test_every_path_is_listed(tmp_path: Path) -> None:
    state = refused()
    with pytest.raises(UnsupportedLeafError) as caught:
        ckptcore.check(state)
    for path in PATHS:
        assert f"\n  {path}" in str(caught.value), path
    with pytest.raises(UnsupportedLeafError) as named:
        ckptcore.check_checkpointables({"first": state, "second": {"lock": threading.Lock()}})
    assert "in 'second': lock" in str(named.value)
    assert "in 'first': deep[0]/function" in str(named.value)
    with ckptcore.Checkpointer(tmp_path / "run") as checkpointer, pytest.raises(UnsupportedLeafError) as of_run:
        checkpointer.check(state)
    assert str(of_run.value) == str(caught.value)
    assert [path.name for path in (tmp_path / "run").iterdir() if not path.name.startswith(".")] in ([], ["run.json"])


def test_a_state_that_can_be_saved_but_not_restored_is_refused() -> None:
    with pytest.raises(UnsupportedLeafError, match=r"cannot be restored: inner.mask .* share memory"):
        ckptcore.check({"model": torch.nn.ModuleDict({"inner": Expanded()})})


def test_a_supported_state_passes_and_its_arrays_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0, "best": None, "history": []}
    for steps in range(2):
        ckptcore.check(state)
        if not steps:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    monkeypatch.setattr(torch.Tensor, "numpy", lambda *arguments: pytest.fail("an array was read"))
    ckptcore.check(state)
    with ckptcore.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.check(state)
        checkpointer.check_checkpointables({"model": model, "optimizer": optimizer})


def test_a_leaf_that_one_rank_cannot_save_fails_all_ranks(tmp_path: Path) -> None:
    def check(coordinator: Any) -> type:
        context = Context(job=JobOptions(coordinator=coordinator))
        state = {"w": np.ones(2), "lock": threading.Lock() if coordinator.rank else None}
        with pytest.raises((RankFailedError, UnsupportedLeafError), match="lock") as caught:
            ckptcore.check(state, context=context)
        return type(caught.value)

    assert list(ThreadJob(2).run(check)) == [RankFailedError, UnsupportedLeafError]


def test_long_lists_and_large_groups_pass() -> None:
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(1001)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    ckptcore.check({"losses": [0.5] * 1000, "by step": dict.fromkeys(range(1000), 1), "optimizer": optimizer})


def test_errors_list_a_limited_number_of_many_cycles() -> None:
    def cycle() -> list[Any]:
        items: list[Any] = []
        items.append(items)
        return items

    state = {**{f"c{number}": cycle() for number in range(300)}, "z": threading.Lock()}
    with pytest.raises(UnsupportedLeafError, match="251 more|and 2"):
        ckptcore.check(state)
