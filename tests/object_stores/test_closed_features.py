"""Services that refuse one kind of request. Other calls work, and the error of a refused call says what to allow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from ckptcore_testing import FaultProxy, HTTPAnswer, ProxiedRequest, Refuse, Refusing

import ckptcore
from ckptcore.commit.location import open_directory
from ckptcore.context import IOOptions
from ckptcore.errors import StoragePermissionError
from ckptcore.runtime import runtime_of
from tests.object_stores.stores import ObjectStore, may_come_late

STATE = {"w": np.arange(3.0), "step": 1}
LARGE = {"w": np.arange(1_500_000.0)}  # uploaded in several parts

_XML = "<?xml version='1.0'?><Error><Code>{}</Code><Message>{}</Message></Error>"
_JSON = '{{"error": {{"code": {}, "message": "{}", "errors": [{{"reason": "{}", "message": "{}"}}]}}}}'


def refused(status: int, code: str, message: str = "refused by a test", *, reason: str = "") -> HTTPAnswer:
    """Return an error in XML, or, with a reason, in the JSON form of Google."""
    body = _JSON.format(status, message, reason, message) if reason else _XML.format(code, message)
    return HTTPAnswer.make(status, "Refused", "application/json" if reason else "application/xml", body.encode())


DENIED = refused(403, "AccessDenied", "Access Denied")


@pytest.fixture
def proxy(object_store: ObjectStore) -> Iterator[FaultProxy]:
    """Start a proxy in front of the store."""
    with FaultProxy(object_store.upstream, dialect=object_store.dialect) as started:
        yield started


def context_of(store: ObjectStore, proxy: FaultProxy) -> ckptcore.Context:
    return ckptcore.Context(storage=store.options(proxy.url), io=IOOptions(threads=2))


def object_bytes(store: ObjectStore, url: str) -> bytes:
    directory, _, name = url.rpartition("/")
    return open_directory(directory, runtime_of(store.direct).storages).get(name)


def closed_lists(store: ObjectStore, *, hides_missing: bool) -> Callable[[ProxiedRequest], HTTPAnswer | Refuse | None]:
    """Refuse lists, as without ``s3:ListBucket``. For a missing object, Amazon S3 then answers 403, too."""

    def refusal(request: ProxiedRequest) -> HTTPAnswer | Refuse | None:
        if store.dialect.is_list(request):
            return DENIED
        return Refuse(DENIED, instead_of=404) if hides_missing else None

    return refusal


@pytest.mark.parametrize("hides_missing", [False, True])
def test_loads_need_no_lists(
    object_store: ObjectStore,
    proxy: FaultProxy,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    *,
    hides_missing: bool,
) -> None:
    place, direct, context = object_store.new_place("closed"), object_store.direct, context_of(object_store, proxy)
    many = {"w": np.arange(3.0), "v": LARGE["w"], "step": 1}
    ckptcore.save(f"{place}/tree", many, layout="dcp", context=direct)
    ckptcore.save_checkpointables(f"{place}/several", {"model": STATE, "optimizer": {"m": np.ones(2)}}, context=direct)
    ckptcore.save(f"{place}/weights", {"w": np.ones(3)}, layout="safetensors", context=direct)
    proxy.plan = Refusing(closed_lists(object_store, hides_missing=hides_missing))
    assert ckptcore.load(f"{place}/tree", context=context)["step"] == 1
    assert ckptcore.load_checkpointables(f"{place}/several", context=context)["optimizer"]["m"].sum() == 2
    assert ckptcore.load_checkpointables(f"{place}/several", ["model"], context=context)["model"]["step"] == 1
    assert ckptcore.load(f"{place}/several/model", context=context)["step"] == 1
    assert set(ckptcore.metadata(f"{place}/several", context=context).checkpointables) == {"model", "optimizer"}
    assert ckptcore.load(f"{place}/weights/model.safetensors", context=context)["w"].sum() == 3
    for name in ("tree", "several"):
        assert ckptcore.verify(f"{place}/{name}", context=context).ok
        ckptcore.copy(f"{place}/{name}", tmp_path / name, context=context)
        assert ckptcore.verify(tmp_path / name).ok
        assert any(f"{name} is copied without the files" in record.message for record in caplog.records)
    # Calls that need a list raise an error. They must not treat unlisted objects as missing.
    for call in (
        lambda: ckptcore.CheckpointReader(f"{place}", context=context),
        lambda: ckptcore.save(f"{place}/new", STATE, context=context),
        lambda: ckptcore.load(f"{place}/missing", context=context),
    ):
        with pytest.raises(StoragePermissionError, match="AccessDenied.*(s3:ListBucket|Storage Object User|Blob Data)"):
            call()


@pytest.mark.parametrize("refusal", ["denied", "unknown"])
def test_a_crashed_step_is_saved_again_without_lists_of_uploads(
    object_store: ObjectStore, proxy: FaultProxy, caplog: pytest.LogCaptureFixture, refusal: str
) -> None:
    place, context = object_store.new_place("uploads"), context_of(object_store, proxy)
    answer = DENIED if refusal == "denied" else refused(501, "NotImplemented", "not implemented")

    def closed(request: ProxiedRequest) -> HTTPAnswer | None:
        lists = "uploads" in request.query or request.query.get("include") == "uncommittedblobs"
        return answer if request.method == "GET" and lists else None

    def crash(request: ProxiedRequest) -> HTTPAnswer | None:
        is_last = request.method == "POST" and "uploadId" in request.query  # completes the first upload
        is_last = is_last or request.query.get("comp") == "blocklist"
        # Deletions are refused, too, so the claim stays.
        return DENIED if is_last or not may_come_late(request) else closed(request)

    proxy.plan = Refusing(crash)
    with pytest.raises(StoragePermissionError):
        ckptcore.save(f"{place}/1", LARGE, context=context)
    assert b"claim" in object_bytes(object_store, f"{place}/1/checkpoint.json")
    object_store.begin_upload(f"{place}/1/left")
    proxy.plan = Refusing(closed)
    ckptcore.save(f"{place}/1", LARGE, context=context)
    ckptcore.save(f"{place}/1", LARGE, overwrite="non-atomic", context=context)
    assert ckptcore.verify(f"{place}/1", context=object_store.direct).ok
    warnings = [record.message for record in caplog.records if "unfinished uploads" in record.message]
    assert len(warnings) == 1 and "lifecycle rule" in warnings[0]


def test_object_lock_needs_digests(object_store: ObjectStore, proxy: FaultProxy) -> None:
    """Amazon S3 and MinIO refuse uploads without digests to a bucket with a default retention."""
    if object_store.scheme != "s3":
        pytest.skip("only S3 requires digests")
    place, context = object_store.new_place("locked"), context_of(object_store, proxy)
    words = "Content-MD5 OR x-amz-checksum- HTTP header is required for Put Object requests with Object Lock parameters"
    refusals = 0

    def refusal(request: ProxiedRequest) -> HTTPAnswer | None:
        nonlocal refusals
        if request.method != "PUT" or "content-md5" in request.headers:
            return None
        refusals += 1
        return refused(400, "InvalidRequest", words)

    proxy.plan = Refusing(refusal)
    with ckptcore.Checkpointer(place, context=context) as run:
        for step in (1, 2):
            run.save_blocking(step, {**LARGE, **STATE})
            assert run.load(step)["step"] == 1
    assert 0 < refusals <= 4, "it is learnt once, by each of the threads that put at the same time"
    assert ckptcore.verify(f"{place}/2", context=object_store.direct).ok


def test_digests_are_enabled_while_many_threads_upload(object_store: ObjectStore, proxy: FaultProxy) -> None:
    if object_store.scheme != "s3":
        pytest.skip("only S3 requires digests")
    together = threading.Barrier(4)

    def refusal(request: ProxiedRequest) -> HTTPAnswer | None:
        if request.method != "PUT" or "content-md5" in request.headers:
            return None
        together.wait(60)  # all requests are refused before the first is sent again
        return refused(400, "MissingContentMD5", "Missing required header for this request: Content-Md5.")

    proxy.plan = Refusing(refusal)
    context = context_of(object_store, proxy)
    storage = open_directory(object_store.new_place("locked"), runtime_of(context).storages, to_write=True)
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(lambda number: storage.put(str(number), b"1"), range(4)))
