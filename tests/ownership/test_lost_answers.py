"""Conditional puts with lost answers. The storage repeats a put, and then finds its own object."""

from __future__ import annotations

import uuid
from pathlib import Path

import numpy as np
import pytest

import ckptcore
from ckptcore import Checkpointer
from ckptcore.builtin.memory import MemoryStorages
from ckptcore.commit.location import commit_method
from ckptcore.commit.subdirectory import Subdirectory
from ckptcore.context import PluginOptions
from ckptcore.errors import ConditionFailedError, SaveLostError
from ckptcore.hookspecs import hookimpl
from ckptcore.policies import LatestN
from ckptcore.protocols import PutCondition, StorageBackend, StorageOptions
from tests.ownership.fake_clock import FakeClock

OPTIONS = StorageOptions(durable=False)


class AnswersLost(Subdirectory):
    """A storage whose first answer to each conditional put is lost. Its client repeats the put."""

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        tag = super().put(key, data, condition=condition)
        return tag if condition is None else super().put(key, data, condition=condition)


@pytest.fixture
def store() -> StorageBackend:
    return AnswersLost(MemoryStorages().open(f"memory://{uuid.uuid4().hex}/steps", OPTIONS), "")


def test_the_storage_refuses_a_repeated_put_that_succeeded(store: StorageBackend) -> None:
    tag = store.put("a", b"1")
    with pytest.raises(ConditionFailedError):
        store.put("a", b"2", condition=ckptcore.protocols.IfTag(tag))
    assert store.get("a") == b"2"


def test_leases_are_taken_renewed_and_released_without_a_warning(
    store: StorageBackend, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    locks = commit_method(store).locks("the/run", clock=clock)
    with locks.own() as owner, locks.pin("1") as pin:
        for _ in range(10):
            clock.sleep(31)
            owner.check()
            pin.check()
    assert commit_method(store).locks().owner() is None
    assert locks.pinned() == frozenset()
    assert caplog.records == []


def test_a_lease_that_another_process_broke_is_lost(store: StorageBackend, caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    process = clock.process()
    zombie = commit_method(store).locks("run", clock=process).own()
    process.is_frozen = True
    with commit_method(store).locks("run", clock=clock).own(if_in_use="take over") as second:
        process.is_frozen = False
        with pytest.raises(SaveLostError, match="taken over"):
            zombie.check()
        zombie.close()
        second.check()
    assert len(caplog.records) == 1


def test_every_renewal_writes_different_bytes(store: StorageBackend) -> None:
    """Otherwise the holder could take an earlier renewal for the current one."""
    clock = FakeClock()
    lock = commit_method(store).locks("run", clock=clock).own()
    first, _ = store.get_with_tag(".ckptcore/owner.json")
    renewed = set()
    for _ in range(3):
        clock.sleep(20)
        renewed.add(store.get(".ckptcore/owner.json"))
    assert len({first, *renewed}) == 4
    lock.close()


def test_an_expired_pin_is_broken(store: StorageBackend) -> None:
    clock = FakeClock()
    dead = clock.process()
    commit_method(store).locks("run", clock=dead).pin("1")
    dead.is_frozen = True
    locks = commit_method(store).locks("run", clock=clock)
    looks = 0
    while locks.pinned():
        clock.sleep(20)
        looks += 1
        assert looks < 10
    assert looks == 4, "found at the first look after its lease time and a quarter"


class _Plugin:
    def __init__(self) -> None:
        self._storages = MemoryStorages()

    def _open(self, url: str, options: StorageOptions) -> StorageBackend:
        return AnswersLost(self._storages.open(url.replace("lost://", "memory://"), options), "")

    @hookimpl
    def ckpt_storages(self) -> dict[str, object]:
        return {"lost": self._open}


def test_runs_partial_saves_and_deletions_log_no_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    context = ckptcore.Context(plugins=PluginOptions(extra=(_Plugin(),)))
    state = {"w": np.arange(9.0)}
    for _ in range(2):
        with Checkpointer("lost://bucket/run", preservation_policy=LatestN(1), context=context) as run:
            start = run.latest or 0
            for step in range(start + 1, start + 4):
                run.save(step, state)
    assert run.steps == (6,)
    ckptcore.save("lost://bucket/one", state, context=context)
    ckptcore.save("lost://bucket/one", state, context=context, overwrite="non-atomic")
    assert (ckptcore.load("lost://bucket/one", context=context)["w"] == state["w"]).all()
    ckptcore.delete("lost://bucket/one", context=context)
    assert caplog.records == []
