"""Lost answers, throttling, and failed writers."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from ckptcore_gcs.plugin import GcsPlugin
from ckptcore_gcs_server import Request, Response, StrictGcs
from ckptcore_obstore.storage import ObjectStoreDirectory

from ckptcore.errors import ConditionFailedError, StorageError
from ckptcore.model import JSON
from ckptcore.protocols import IF_ABSENT, IfTag, StorageOptions

PART = 5 << 20
LARGE = bytes(range(256)) * (48 << 10)  # two complete parts and a shorter one
UPLOADS = ["parts", "composite"]


def _open(gcs: StrictGcs, **config: JSON) -> ObjectStoreDirectory:
    options = {"endpoint": gcs.url, "anonymous": True, "part_bytes": PART, **config}
    storage = GcsPlugin().open("gs://bucket/run", StorageOptions(config=options))
    assert isinstance(storage, ObjectStoreDirectory)
    return storage


class Losing:
    """Handles every request, but loses the answer to the first request of each kind that changes data."""

    def __init__(self) -> None:
        self.lost: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, request: Request, serve: Callable[[Request], Response]) -> Response | None:
        """Return the answer that the client receives, or None to lose it."""
        answer = serve(request)
        kind = (
            f"{request.method} {'uploads' in request.query} {'uploadId' in request.query} "
            f"{request.path.split('/')[1:3]}"
        )
        kind += " " + next((verb for verb in ("compose", "rewriteTo", "batch") if verb in request.path), "")
        with self._lock:
            if request.method in ("GET", "HEAD") or kind in self.lost:
                return answer
            self.lost.add(kind)
        return None


@pytest.mark.parametrize("uploads", UPLOADS)
def test_lost_answers_change_nothing(gcs: StrictGcs, uploads: str) -> None:
    gcs.intercept = losing = Losing()
    storage = _open(gcs, uploads=uploads)
    tag = storage.put("root", b"claim", condition=IF_ABSENT)
    assert storage.get_with_tag("root") == (b"claim", tag)
    losing.lost.clear()
    tag = storage.put("root", b"commit", condition=IfTag(tag))
    assert storage.get_with_tag("root") == (b"commit", tag)
    for open_writer in (storage.open_new, storage.open_writer):
        losing.lost.clear()
        writer = open_writer(open_writer.__name__, len(LARGE))
        writer.write_at(0, LARGE)
        writer.finish()
        assert storage.get(open_writer.__name__) == LARGE
        assert len(losing.lost) >= 2
    assert list(storage.list()) == ["open_new", "open_writer", "root"]
    losing.lost.clear()
    storage.delete(["open_new", "open_writer", "root"])
    assert gcs.service.buckets.list("bucket", limit=9).objects == []
    # If the answer that begins an upload is lost, its id is unknown. Aborting by prefix finds this upload.
    left = len(gcs.service.buckets.part_uploads)
    assert left == (2 if uploads == "parts" else 0)
    assert storage.abort_uploads("") == left
    assert gcs.service.buckets.part_uploads == {}


@pytest.mark.parametrize("uploads", UPLOADS)
def test_a_failed_condition_is_an_error_despite_lost_answers(gcs: StrictGcs, uploads: str) -> None:
    """Another writer stored equal bytes before. The object is not mistaken for the result of the own put."""
    storage = _open(gcs, uploads=uploads)
    storage.put("root", b"claim", condition=IF_ABSENT)
    gcs.intercept = Losing()
    with pytest.raises(ConditionFailedError):
        storage.put("root", b"claim", condition=IF_ABSENT)
    writer = storage.open_new("root", len(LARGE))
    writer.write_at(0, LARGE)
    with pytest.raises(ConditionFailedError):
        writer.finish()
    writer.abort()
    assert storage.get("root") == b"claim"
    assert list(storage.list()) == ["root"]
    assert len(gcs.service.buckets.list("bucket", limit=9).objects) == 1, "no temporary object is left"


@pytest.mark.parametrize("status", [429, 503])
def test_a_throttling_service_gets_retries_and_fewer_requests(gcs: StrictGcs, status: int) -> None:
    storage = _open(gcs)
    refused = 0

    def throttle(request: Request, serve: Callable[[Request], Response]) -> Response:
        nonlocal refused
        if refused < 3:
            refused += 1
            return Response(status, {}, b"<Error><Code>SlowDown</Code></Error>")
        return serve(request)

    gcs.intercept = throttle
    storage.put("a", b"1")
    assert storage.get("a") == b"1"
    assert refused == 3
    assert storage.bucket.limit.cuts == 1
    assert storage.bucket.limit.allowed < storage.capabilities.concurrency


@pytest.mark.parametrize("uploads", UPLOADS)
def test_a_late_writer_does_not_replace_a_new_object(gcs: StrictGcs, uploads: str) -> None:
    """Another writer creates the object after all checks, but before the last request."""
    storage = _open(gcs, uploads=uploads)
    writer = storage.open_new("model", len(LARGE))
    writer.write_at(0, LARGE)

    def overtake(request: Request, serve: Callable[[Request], Response]) -> Response:
        if any(verb in request.path for verb in ("rewriteTo", "compose")):
            gcs.intercept = None
            storage.put("model", b"of another save", condition=IF_ABSENT)
        return serve(request)

    gcs.intercept = overtake
    with pytest.raises(ConditionFailedError):
        writer.finish()
    assert gcs.intercept is None
    assert storage.get("model") == b"of another save"


@pytest.mark.parametrize("uploads", UPLOADS)
def test_unfinished_uploads_of_a_failed_writer_are_aborted(gcs: StrictGcs, uploads: str) -> None:
    storage = _open(gcs, uploads=uploads)
    storage.put("kept", b"1")
    abandoned = storage.open_new("model", len(LARGE))
    abandoned.write_at(0, LARGE)
    assert list(storage.list()) == ["kept"]
    assert list(storage.list_names()) == ["kept"]
    assert _open(gcs, uploads=uploads).abort_uploads("") == 1
    with pytest.raises(StorageError):
        abandoned.finish()
    assert [stored.name for stored in gcs.service.buckets.list("bucket", limit=9).objects] == ["run/kept"]
    assert gcs.service.buckets.part_uploads == {}


@pytest.mark.parametrize("uploads", UPLOADS)
def test_without_the_permission_to_delete(gcs: StrictGcs, uploads: str, caplog: pytest.LogCaptureFixture) -> None:
    """Accounts with the role Storage Object Creator lack this permission."""
    storage = _open(gcs, uploads=uploads)

    def refuse(request: Request, serve: Callable[[Request], Response]) -> Response:
        if request.path.startswith("/batch") or request.method == "DELETE":
            return Response(403, {}, b'{"error": {"errors": [{"reason": "forbidden"}]}}')
        assert request.method != "GET" or not request.path.endswith("model"), "the object is read again"
        return serve(request)

    gcs.intercept = refuse
    for name in ("model", "another"):
        writer = storage.open_new(name, len(LARGE))
        writer.write_at(0, LARGE)
        writer.finish()
    assert storage.abort_uploads("") == 0
    assert sum("cannot be deleted" in record.getMessage() for record in caplog.records) == 1
    gcs.intercept = None
    assert storage.get("model") == storage.get("another") == LARGE
    assert storage.abort_uploads("") == 2
    assert storage.abort_uploads("") == 0


def test_many_parts_are_composed_in_steps(gcs: StrictGcs) -> None:
    storage = _open(gcs, uploads="composite")
    upload = storage.bucket.begin_upload("run/many", if_absent=True)
    tags = {number: upload.put_part(number, b"%05d" % number) for number in range(1, 1 + 32 * 2 + 3)}
    upload.complete(tags, if_absent=True)
    assert storage.get("many") == b"".join(b"%05d" % number for number in sorted(tags))
    assert [stored.name for stored in gcs.service.buckets.list("bucket", limit=9).objects] == ["run/many"]
    assert sum("compose" in request for request in gcs.requests) == 4


def test_objects_are_deleted_in_batches(gcs: StrictGcs) -> None:
    storage = _open(gcs)
    names = [f"d/{number}" for number in range(150)]
    for name in names:
        storage.put(name, b"")
    gcs.requests.clear()
    storage.delete([*names, "d/none"])
    assert gcs.requests == ["POST /batch/storage/v1"] * 2
    assert list(storage.list()) == []
