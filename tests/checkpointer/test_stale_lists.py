"""Stale lists of a storage: a deleted step is still listed, and a new step is not listed yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from ckptcore import Checkpointer
from ckptcore.builtin.memory import MemoryStorage
from tests.checkpointer.runs import assert_is_step, keys_of, remove, save_steps


class _StaleLists:
    """A patch of storages in memory: their lists always show the given steps."""

    def __init__(self, patch: pytest.MonkeyPatch, directory: str, steps: Sequence[int]) -> None:
        names = [f"{step}/" for step in steps]
        real_names, real_list = MemoryStorage.list_names, MemoryStorage.list
        keys: dict[str, list[str]] = {}

        def list_names(storage: MemoryStorage, prefix: str = "") -> Sequence[str]:
            if not prefix and repr(storage) == f"MemoryStorage({directory!r})":
                hidden = [name for name in real_names(storage) if name.startswith(".")]
                return sorted([*hidden, *names])
            return keys.get(prefix.rstrip("/")) or real_names(storage, prefix)

        def list_keys(storage: MemoryStorage, prefix: str = "") -> Iterator[str]:
            below = prefix.rstrip("/")
            return iter([f"{below}/{key}" for key in keys[below]]) if below in keys else real_list(storage, prefix)

        for step in steps:
            keys[str(step)] = ["checkpoint.json", "model.safetensors"]
        patch.setattr(MemoryStorage, "list_names", list_names)
        patch.setattr(MemoryStorage, "list", list_keys)


def test_a_deleted_step_in_a_stale_list_is_ignored(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(memory) as run:
        save_steps(run, [1, 2, 3])
        run.delete(3)
        _StaleLists(monkeypatch, memory, [1, 2, 3])
        run.reload()
        assert run.latest == 2
        assert_is_step(run.load(), 2)
    with Checkpointer(memory) as run:
        assert run.steps == (1, 2)
        assert_is_step(run.load(), 2)


def test_a_saved_step_missing_from_a_stale_list_is_found(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(memory) as run:
        save_steps(run, [1, 2, 3])
        _StaleLists(monkeypatch, memory, [1, 2])
        run.reload()
        assert run.latest == 3
        assert_is_step(run.load(), 3)
        run.reload()
        assert run.steps == (1, 2, 3)


def test_a_step_deleted_by_another_process_is_ignored(memory: str) -> None:
    with Checkpointer(memory) as run:
        save_steps(run, [1, 2, 3])
        for key in keys_of(memory, "3"):
            remove(memory, key)
        run.reload()
        assert run.steps == (1, 2)
        assert run.latest == 2
