"""Commands on a remote storage: which requests they send, and how many at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from ckptcore_testing.far_storage import FarStorage

import ckptcore
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.context import default_context
from ckptcore.hookspecs import hookimpl
from ckptcore.plugins import installed_plugins
from ckptcore.protocols import StorageBackend, StorageOpener, StorageOptions
from plugins.tools.tests.cli.conftest import Run

_STEPS: Final = 40
_ENOUGH_AT_ONCE: Final = 5


class _Plugin:
    def __init__(self, far: FarStorage) -> None:
        self._far = far

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        return {"far": self._open}

    def _open(self, url: str, options: StorageOptions) -> StorageBackend:
        return subdirectory(self._far, url.removeprefix("far://"))


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Iterator[FarStorage]:
    """A remote storage for URLs ``far://``."""
    storage = FarStorage(latency=0.01)
    having = installed_plugins().with_plugins([_Plugin(storage)], {})
    monkeypatch.setattr("ckptcore.runtime.installed_plugins", lambda: having)
    default_context.cache_clear()
    yield storage
    default_context.cache_clear()


@pytest.fixture
def steps(far: FarStorage) -> FarStorage:
    """The remote storage with a run of many steps, at ``far://runs/run``."""
    storage, latency = far, far.latency
    storage.latency = 0.0
    state = {"w": np.arange(1000), "b": [np.ones(3), 2]}
    ckptcore.save("far://runs/run/0", state, layout="zarr3")
    for step in range(1, _STEPS):
        for key in list(storage.list("runs/run/0")):
            storage.put(key.replace("runs/run/0", f"runs/run/{step}", 1), storage.get(key))
    storage.latency = latency
    storage.forget()
    return storage


def _read(storage: FarStorage) -> set[str]:
    """Return the names of the objects that were read."""
    return {request.key.rpartition("/")[2] for request in storage.requests if request.kind == "get"}


def test_commands_that_only_list_read_no_data(run: Run, steps: FarStorage) -> None:
    for arguments in (["inspect", "far://runs/run/3"], ["ls", "far://runs/run"], ["steps", "far://runs/run"]):
        steps.forget()
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        assert _read(steps) <= {"checkpoint.json", "owner.json", "near.json"}, arguments
    steps.forget()
    run("inspect", "far://runs/run/3")
    assert steps.count() <= 5


@pytest.mark.parametrize(
    "arguments",
    [
        ["steps", "far://runs/run"],
        ["ls", "far://runs/run"],
        ["gc", "far://runs/run", "--policy", "latest_n=2", "--dry-run"],
    ],
)
def test_steps_are_requested_concurrently(run: Run, steps: FarStorage, arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") >= _STEPS
    assert steps.peak_at_once >= _ENOUGH_AT_ONCE
    # Before a deletion, gc also lists the step, because files of other programs may keep it.
    per_step = 7 if arguments[0] == "gc" else 6
    assert steps.count() <= per_step * _STEPS


def test_a_run_is_listed_with_one_small_request_per_step(steps: FarStorage) -> None:
    with ckptcore.CheckpointReader("far://runs/run") as reader:
        assert len(reader.steps) == _STEPS
    assert steps.peak_at_once >= _ENOUGH_AT_ONCE
    assert steps.count("get") <= _STEPS + 2


def test_a_copy_sends_many_requests_at_once(run: Run, far: FarStorage, tmp_path: Path) -> None:
    latency, far.latency = far.latency, 0.0
    layout = ckptcore.SafetensorsLayout(max_file_bytes=1 << 20)
    state = {f"w{number}": np.full(1 << 20, number, np.uint8) for number in range(12)}
    ckptcore.save("far://runs/one", state, layout=layout)
    far.latency = latency
    for source, destination in (("far://runs/one", tmp_path / "here"), (tmp_path / "here", "far://runs/two")):
        far.forget()
        assert run("copy", source, destination).exit_code == 0
        assert far.peak_at_once >= _ENOUGH_AT_ONCE
    objects = len(ckptcore.metadata("far://runs/two").objects)
    # For each object, the copy uploads it and reads the claim twice. The whole checkpoint needs a few more requests.
    assert far.count() <= 6 * objects + 20
    far.forget()
    assert run("copy", tmp_path / "here", "far://runs/two").exit_code == 0
    assert far.count() <= 6


def test_a_resumed_run_looks_for_leftovers_of_several_steps_at_once(steps: FarStorage) -> None:
    with ckptcore.Checkpointer("far://runs/run") as run:
        assert run.latest == _STEPS - 1
    assert steps.peak_at_once >= _ENOUGH_AT_ONCE
    assert steps.count() <= _STEPS + 15


def test_objects_are_verified_concurrently(run: Run, far: FarStorage) -> None:
    latency, far.latency = far.latency, 0.0
    ckptcore.save("far://runs/one", {f"w{number}": np.arange(10) for number in range(20)}, layout="zarr3")
    far.latency = latency
    far.forget()
    assert run("verify", "far://runs/one").exit_code == 0
    assert far.peak_at_once >= _ENOUGH_AT_ONCE
