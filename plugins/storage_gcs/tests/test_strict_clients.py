"""Other clients use the strict GCS server like the real service."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import gcsfs
import obstore
import pytest
import tensorstore
from ckptcore_gcs_server import StrictGcs
from gcsfs.core import GCSFileSystem
from google.api_core.exceptions import PreconditionFailed
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import GCSStore

NAMES = ("plain", "a b/%41?ü#+&='()*~[y]", "deep/" * 20 + "end", "日本語/~")


@pytest.fixture
def store(gcs: StrictGcs) -> GCSStore:
    """The bucket, opened with obstore."""
    key = {"gcs_base_url": gcs.url, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    return GCSStore(
        "bucket",
        service_account_key=json.dumps(key),
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )


@pytest.mark.parametrize("name", NAMES)
def test_obstore_reads_what_it_put(store: GCSStore, name: str) -> None:
    obstore.put(store, name, b"0123456789", use_multipart=False)
    assert bytes(obstore.get(store, name).bytes()) == b"0123456789"
    assert bytes(obstore.get_range(store, name, start=3, end=5)) == b"34"
    assert obstore.head(store, name)["size"] == 10
    assert [stored["path"] for page in obstore.list(store) for stored in page] == [name]
    obstore.delete(store, name)
    with pytest.raises(FileNotFoundError):
        obstore.get(store, name)


def test_obstore_raises_an_error_for_a_failed_condition(store: GCSStore) -> None:
    first = obstore.put(store, "a", b"first", mode="create", use_multipart=False)
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "a", b"second", mode="create", use_multipart=False)
    second = obstore.put(store, "a", b"second", mode=first, use_multipart=False)
    with pytest.raises(PreconditionError):
        obstore.put(store, "a", b"third", mode=first, use_multipart=False)
    assert obstore.head(store, "a")["version"] == second["version"]
    with pytest.raises(AlreadyExistsError):
        obstore.copy(store, "a", "a", overwrite=False)


def test_obstore_writes_in_parts(store: GCSStore, gcs: StrictGcs) -> None:
    data = bytes(range(256)) * (44 << 10)
    with obstore.open_writer(store, "parts", buffer_size=5 << 20) as writer:
        writer.write(data)
    assert gcs.service.buckets.get("bucket", "parts").data == data
    assert gcs.service.buckets.get("bucket", "parts").md5 is None
    assert gcs.service.buckets.part_uploads == {}


def test_obstore_lists_a_level_at_a_time_and_in_pages(store: GCSStore, gcs: StrictGcs) -> None:
    names = [f"d{number % 3}/{number:04d}" for number in range(1100)] + ["top"]
    for name in names:
        obstore.put(store, name, b"", use_multipart=False)
    assert sorted(stored["path"] for page in obstore.list(store) for stored in page) == sorted(names)
    level = obstore.list_with_delimiter(store)
    assert level["common_prefixes"] == ["d0", "d1", "d2"]
    assert [stored["path"] for stored in level["objects"]] == ["top"]
    assert sum("list-type=2" in request for request in gcs.requests) == 3


@pytest.fixture
def files(gcs: StrictGcs) -> Any:
    """The service, opened with gcsfs.

    Its extension for zonal buckets is not used, because it would request the type of the bucket by gRPC.
    """
    return GCSFileSystem(token="anon", endpoint_url=gcs.url, skip_instance_cache=True)


def test_gcsfs_reads_what_it_wrote(files: Any) -> None:
    for name in NAMES[2:]:
        files.pipe(f"bucket/{name}", b"0123456789")
        assert files.cat(f"bucket/{name}") == b"0123456789"
        assert files.cat_file(f"bucket/{name}", 3, 5) == b"34"
        assert files.size(f"bucket/{name}") == 10
        files.rm_file(f"bucket/{name}")
        assert not files.exists(f"bucket/{name}")


@pytest.mark.skipif(gcsfs.__version__ < "2024.12", reason="this version of gcsfs lacks an argument of fsspec")
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_gcsfs_writes_by_a_resumable_upload(files: Any) -> None:
    data = bytes(range(256)) * (28 << 10)
    with files.open("bucket/big", "wb", block_size=5 << 20) as file:
        file.write(data)
    assert files.cat("bucket/big") == data
    files.cp_file("bucket/big", "bucket/copy")
    files.merge("bucket/twice", ["bucket/big", "bucket/copy"])
    assert files.size("bucket/twice") == 2 * len(data)
    with pytest.raises(FileExistsError):
        files.pipe_file("bucket/big", b"1", mode="create")


@pytest.fixture
def client(gcs: StrictGcs) -> Iterator[storage.Client]:
    """The service, opened with Google's library."""
    client = storage.Client("project", credentials=AnonymousCredentials(), client_options={"api_endpoint": gcs.url})
    yield client
    client.close()


def test_googles_library_supports_conditions(client: storage.Client) -> None:
    bucket = client.bucket("bucket")
    blob = bucket.blob("a/b c")
    blob.upload_from_string(b"0123456789", if_generation_match=0)
    with pytest.raises(PreconditionFailed):
        blob.upload_from_string(b"other", if_generation_match=0)
    assert blob.download_as_bytes(start=3, end=4) == b"34"
    resumable = bucket.blob("resumable", chunk_size=256 << 10)
    data = bytes(range(256)) * 2500
    resumable.upload_from_file(io.BytesIO(data), if_generation_match=0)
    assert resumable.download_as_bytes(checksum="crc32c") == data
    with pytest.raises(PreconditionFailed):
        bucket.blob("resumable", chunk_size=256 << 10).upload_from_file(io.BytesIO(data), if_generation_match=0)
    composed = bucket.blob("composed")
    composed.compose([resumable, blob], if_generation_match=0)
    assert composed.download_as_bytes(checksum="crc32c") == data + b"0123456789"
    with pytest.raises(PreconditionFailed):
        bucket.copy_blob(blob, bucket, "composed", if_generation_match=0)
    with pytest.raises(PreconditionFailed):
        blob.delete(if_generation_match=1)
    assert [stored.name for stored in client.list_blobs("bucket")] == ["a/b c", "composed", "resumable"]
    assert next(iter(client.list_blobs("bucket", delimiter="/", max_results=1))).name == "composed"
    with client.batch():
        for name in ("a/b c", "composed", "resumable"):
            bucket.blob(name).delete()
    assert list(client.list_blobs("bucket")) == []


def test_tensorstore_compares_and_swaps(gcs: StrictGcs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", gcs.url)
    store = tensorstore.KvStore.open({"driver": "gcs", "bucket": "bucket", "path": "below/"}).result()
    first = store.write("a", b"first").result()
    assert store.read("none").result().state == "missing"
    second = store.write("a", b"second", if_equal=first.generation).result()
    lost = store.write("a", b"third", if_equal=first.generation).result()
    assert lost.generation != second.generation
    read = store.read("a").result()
    assert (read.value, read.stamp.generation) == (b"second", second.generation)
    assert store.read("a", if_not_equal=second.generation).result().state == "unspecified"
    assert store.list().result() == [b"a"]
    store.delete_range(tensorstore.KvStore.KeyRange()).result()
    assert store.list().result() == []
