"""Checkpoints in Azure are saved, loaded, replaced and deleted, also as steps of a run.

This is tested with each kind of credential, and with lost answers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pytest
from ckptcore_azure.settings import EMULATOR_KEY
from ckptcore_azure.testing import DIALECT, Azurite
from ckptcore_testing import FaultProxy, LoseAnswer, ProxiedRequest, RequestFault, StoreDialect

import ckptcore
from ckptcore import policies
from ckptcore.commit.location import open_directory
from ckptcore.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConditionFailedError,
    InvalidLocationError,
    ObjectNotFoundError,
    StorageError,
    StoragePermissionError,
)
from ckptcore.model import JSON
from ckptcore.protocols import IF_ABSENT, IfTag, StorageBackend
from ckptcore.runtime import runtime_of
from plugins.storage_azure.tests.signatures import account_signature

pytestmark = pytest.mark.system

LARGE = bytes(range(256)) * (48 << 10)  # two complete blocks and a shorter one
STATE = {"w": np.arange(4_000_000, dtype=np.float32).reshape(2000, 2000), "b": np.ones(3), "step": 7}


def context_of(server: Azurite, **options: JSON) -> ckptcore.Context:
    """Return a Context with the options of the server. The given options replace some of them."""
    config = {**server.options, "part_bytes": 5 << 20, **options}
    return ckptcore.Context(storage={"az": {name: value for name, value in config.items() if value is not None}})


def storage_of(location: str, context: ckptcore.Context) -> StorageBackend:
    """Open the storage of a location."""
    return open_directory(location, runtime_of(context).storages, to_write=True)


@pytest.mark.parametrize(
    "layout",
    ["safetensors", "dcp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ocdbt", "zarr3", "zarr"))],
)
def test_a_checkpoint_comes_back(emulator: Azurite, layout: str) -> None:
    location, context = f"az://{emulator.create_bucket()}/run/step_1", context_of(emulator)
    ckptcore.save(location, STATE, layout=layout, context=context)
    loaded = ckptcore.load(location, context=context)
    np.testing.assert_array_equal(loaded["w"], STATE["w"])
    assert loaded["step"] == 7
    with pytest.raises(CheckpointExistsError):
        ckptcore.save(location, STATE, layout=layout, context=context)
    ckptcore.delete(location, context=context)
    assert list(storage_of(location, context).list()) == []
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.load(location, context=context)


@pytest.mark.lives(
    "Azure",
    "Azurite 3.35",
    "saves, loads, runs; one commit for each save, also with lost answers",
    "no atomic replacement: `overwrite=True` is refused. Accounts with a hierarchical namespace were not tried",
)
def test_steps_of_a_run(emulator: Azurite) -> None:
    place, context = f"az://{emulator.create_bucket()}/run", context_of(emulator)
    with ckptcore.Checkpointer(place, preservation_policy=policies.LatestN(2), context=context) as steps:
        for number in range(4):
            steps.save(number, {"w": np.full(10, number)})
        steps.wait()
        np.testing.assert_array_equal(steps.load()["w"], np.full(10, 3))
    with ckptcore.CheckpointReader(place, context=context) as reader:
        assert list(reader.steps) == [2, 3]


@pytest.mark.parametrize("kind", ["signature", "environment", "another spelling"])
def test_other_credentials(kind: str, emulator: Azurite, monkeypatch: pytest.MonkeyPatch) -> None:
    location = f"{'azure' if kind == 'another spelling' else 'az'}://{emulator.create_bucket()}/run"
    if kind == "signature":
        context = context_of(emulator, account_key=None, sas_token=account_signature())
    else:
        for name, value in emulator.environment.items():
            monkeypatch.setenv(name, value)
        context = ckptcore.Context()
    ckptcore.save(location, STATE, layout="dcp", context=context)
    ckptcore.save(location, STATE, layout="dcp", overwrite="non-atomic", context=context)
    np.testing.assert_array_equal(ckptcore.load(location, context=context)["w"], STATE["w"])
    ckptcore.delete(location, context=context)


def test_the_error_for_a_signature_without_permission_to_write(emulator: Azurite) -> None:
    signature = account_signature("rl")
    context = context_of(emulator, account_key=None, sas_token=signature)
    with pytest.raises(StoragePermissionError, match=r"az://.*signature the permissions racwdl") as caught:
        ckptcore.save(f"az://{emulator.create_bucket()}/run", {"w": np.ones(3)}, context=context)
    assert signature.rpartition("sig=")[2] not in str(caught.value)


def test_without_the_permission_to_delete(emulator: Azurite, caplog: pytest.LogCaptureFixture) -> None:
    """Temporary blobs remain, and one warning reports it. The saves succeed without reading the blobs again."""
    container = emulator.create_bucket()
    context = context_of(emulator, account_key=None, sas_token=account_signature("racwl"))
    with FaultProxy(emulator.server.url, plan := _Nothing(), dialect=DIALECT) as proxy:
        endpoint = emulator.endpoint.replace(emulator.server.url, proxy.url)
        storage = storage_of(
            f"az://{container}/run",
            context_of(emulator, account_key=None, sas_token=account_signature("racwl"), endpoint=endpoint),
        )
        for name in ("a", "b"):
            writer = storage.open_new(name, len(LARGE))
            writer.write_at(0, LARGE)
            writer.finish()
        assert not [key for key in plan.read if ".ckptcore-upload-" not in key], "only the service reads, to copy"
        assert storage.abort_uploads() == 0
        assert "".join(plan.lists) == "uncommittedblobs", "one list"
    ckptcore.save(f"az://{container}/other", STATE, layout="safetensors", context=context)
    np.testing.assert_array_equal(ckptcore.load(f"az://{container}/other", context=context)["w"], STATE["w"])
    words = "temporary objects of uploads, with .ckptcore-upload- in their names, cannot be deleted"
    assert sum(words in record.getMessage() for record in caplog.records) == 2, "one for each endpoint"
    with_key = storage_of(f"az://{container}/run", context_of(emulator))
    assert list(with_key.list()) == ["a", "b"] and with_key.abort_uploads() == 2
    assert with_key.abort_uploads() == 0


class _Nothing:
    """A plan without faults that records lists and reads."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.lists: list[str] = []

    def faults(self, request: ProxiedRequest, dialect: StoreDialect) -> Sequence[RequestFault]:
        """See `RequestPlan`."""
        if dialect.is_list(request):
            self.lists.append(request.query.get("include", ""))
        elif request.method == "GET":
            self.read.append(request.path)
        return ()


class _LosesFirstAnswers:
    """Loses the answer to the first request of each kind that changes data."""

    def __init__(self) -> None:
        self.lost: set[str] = set()

    def faults(self, request: ProxiedRequest, dialect: StoreDialect) -> Sequence[RequestFault]:
        """See `RequestPlan`."""
        kind = f"{request.method} {request.query.get('comp')} {'x-ms-copy-source' in request.headers}"
        if not request.changes or kind in self.lost:
            return ()
        self.lost.add(kind)
        return (LoseAnswer(),)


class _AbortsBeforeCopy:
    """No faults. Aborts all uploads through another storage before each request for a copy."""

    def __init__(self, other: StorageBackend) -> None:
        self._other = other

    def faults(self, request: ProxiedRequest, dialect: StoreDialect) -> Sequence[RequestFault]:
        """See `RequestPlan`."""
        if "x-ms-copy-source" in request.headers:
            self._other.abort_uploads()
        return ()


def test_lost_answers_change_nothing(emulator: Azurite) -> None:
    container = emulator.create_bucket()
    with FaultProxy(emulator.server.url, plan := _LosesFirstAnswers(), dialect=DIALECT) as proxy:
        endpoint = emulator.endpoint.replace(emulator.server.url, proxy.url)
        storage = storage_of(f"az://{container}/run", context_of(emulator, endpoint=endpoint, first_wait=0.001))
        tag = storage.put("root", b"claim", condition=IF_ABSENT)
        assert storage.get_with_tag("root") == (b"claim", tag)
        plan.lost.clear()
        commit = storage.put("root", b"commit", condition=IfTag(tag))
        assert storage.get_with_tag("root") == (b"commit", commit)
        with pytest.raises(ConditionFailedError):
            storage.put("root", b"late", condition=IfTag(tag))
        for name, open_writer in (("new", storage.open_new), ("any", storage.open_writer)):
            plan.lost.clear()
            writer = open_writer(name, len(LARGE))
            writer.write_at(0, LARGE)
            writer.finish()
            assert storage.get(name) == LARGE
            assert {"PUT block False", "PUT blocklist False"} <= plan.lost
        assert list(storage.list()) == ["any", "new", "root"]
        assert storage.abort_uploads() == 0, "the temporary blob of the copy is deleted"
        plan.lost.clear()
        storage.delete(["any", "missing", "new", "root"])
        assert list(storage.list()) == []


def test_only_the_blocks_of_one_upload_are_committed(emulator: Azurite) -> None:
    """Two writers upload to the same name concurrently."""
    storage = storage_of(f"az://{emulator.create_bucket()}/run", context_of(emulator))
    first, second = storage.open_writer("a", len(LARGE)), storage.open_writer("a", len(LARGE))
    first.write_at(0, LARGE)
    second.write_at(0, LARGE[::-1])
    second.finish()
    assert storage.get("a") == LARGE[::-1]


def test_a_missing_temporary_blob_is_not_reported_as_a_missing_object(emulator: Azurite) -> None:
    """Another save may abort the upload immediately before the copy."""
    container = emulator.create_bucket()
    other = storage_of(f"az://{container}/run", context_of(emulator))
    with FaultProxy(emulator.server.url, _AbortsBeforeCopy(other), dialect=DIALECT) as proxy:
        endpoint = emulator.endpoint.replace(emulator.server.url, proxy.url)
        storage = storage_of(f"az://{container}/run", context_of(emulator, endpoint=endpoint))
        writer = storage.open_new("a", len(LARGE))
        writer.write_at(0, LARGE)
        with pytest.raises(
            StorageError, match=r"run/a: the upload does not exist.*Save again: another save may"
        ) as caught:
            writer.finish()
    assert not isinstance(caught.value, ObjectNotFoundError)
    assert list(other.list()) == []


def test_aborting_uploads_keeps_blobs_of_other_saves(emulator: Azurite) -> None:
    """`abort_uploads` discards uncommitted blocks, but does not replace the blob of another save."""
    storage = storage_of(f"az://{emulator.create_bucket()}/run", context_of(emulator))
    writer = storage.open_writer("a", len(LARGE))
    writer.write_at(0, LARGE[: 6 << 20])
    tag = storage.put("a", b"another's")
    assert storage.abort_uploads() == 0
    writer.abort()
    assert storage.get_with_tag("a") == (b"another's", tag)


@pytest.mark.parametrize("name", ["w.", "a.\\b"])
def test_keys_that_azure_would_change_are_refused(name: str, emulator: Azurite) -> None:
    """Azure drops dots at the end of names, so `w` and `w.` would be the same blob. Azurite keeps the dots."""
    place, context = f"az://{emulator.create_bucket()}/run", context_of(emulator)
    state = {"w": np.zeros(4), name: np.ones(4)}
    with pytest.raises(InvalidLocationError, match=r"invalid key 'run/.*Azure .*another layout, such as 'safetensors'"):
        ckptcore.save(f"{place}/1", state, layout="zarr", context=context)
    for layout in ("safetensors", "ocdbt"):
        ckptcore.save(f"{place}/{layout}", state, layout=layout, context=context)
        np.testing.assert_array_equal(ckptcore.load(f"{place}/{layout}", context=context)[name], np.ones(4))


def test_a_forked_child_can_read(emulator: Azurite) -> None:
    location, context = f"az://{emulator.create_bucket()}/run", context_of(emulator)
    storage = storage_of(location, context)
    storage.put("a", b"1")
    storage.get("a")
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, storage_of(location, context).get("a"))
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    assert os.read(reading, 10) == b"1"
    os.close(reading)


def test_the_address_does_not_contain_the_key(emulator: Azurite) -> None:
    storage = storage_of(f"az://{emulator.create_bucket()}/run", context_of(emulator))
    assert storage.address is not None and EMULATOR_KEY not in repr(storage.address) + repr(storage)
