"""Checkpoints on web servers can be loaded and inspected. Saving to them is refused."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ckptcore_fsspec.opening import open_url
from ckptcore_testing.servers import free_port
from ckptcore_testing.storage import UNUSUAL_KEYS

import ckptcore
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
    StorageCredentialsError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    StorageThrottledError,
)
from ckptcore.protocols import StorageBackend, StorageOptions
from plugins.storage_fsspec.tests.web_servers import PlainHandler, RangesHandler, serve_directory

Requests = list[tuple[str, str | None]]
STATE = {"w": np.arange(300_000, dtype=np.float32).reshape(300, 1000), "step": 3, "name": "ü"}


@pytest.fixture(params=[PlainHandler, RangesHandler], ids=["no ranges", "ranges"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Requests]]:
    with serve_directory(tmp_path, request.param) as served:
        yield served


def storage_at(url: str) -> StorageBackend:
    return open_url(url, StorageOptions())


def test_a_checkpoint_loads(server: tuple[str, Requests], tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "run with space" / "step_1", STATE)
    url = f"{server[0]}/run%20with%20space/step_1"
    loaded = ckptcore.load(url)
    assert np.array_equal(loaded["w"], STATE["w"])
    assert loaded["step"] == 3
    assert ckptcore.metadata(url).layout == "safetensors"
    assert ckptcore.verify(url).ok
    part = ckptcore.load(url, {"name": "", "w": ckptcore.PLACEHOLDER, "step": ckptcore.PLACEHOLDER})
    assert part["name"] == "ü"


def test_checkpointables_load(server: tuple[str, Requests], tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "both", {"model": STATE, "data": {"position": 7}})
    assert ckptcore.load_checkpointables(f"{server[0]}/both", ["data"]) == {"data": {"position": 7}}
    ckptcore.delete(tmp_path / "both" / "model")
    with pytest.raises(CheckpointNotFoundError, match="deleted later"):
        ckptcore.load_checkpointables(f"{server[0]}/both", ["model"])


def test_a_file_of_other_software_loads(server: tuple[str, Requests], tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"a": np.arange(10)}, tmp_path / "model.safetensors")
    assert ckptcore.load(f"{server[0]}/model.safetensors")["a"].tolist() == list(range(10))


def test_a_directory_of_other_software_needs_a_listing(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    (tmp_path / "hub").mkdir()
    save_file({"a": np.arange(10)}, tmp_path / "hub" / "model.safetensors")
    with serve_directory(tmp_path, PlainHandler) as (url, _):
        assert ckptcore.load(f"{url}/hub")["a"].tolist() == list(range(10))
    with serve_directory(tmp_path, RangesHandler) as (url, _), pytest.raises(CheckpointNotFoundError):
        ckptcore.load(f"{url}/hub")


def test_the_error_for_a_missing_checkpoint(server: tuple[str, Requests]) -> None:
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.load(f"{server[0]}/nothing")


def test_the_error_for_a_write_to_azure_names_the_plugin() -> None:
    storage = open_url("https://team.blob.core.windows.net/box/run", StorageOptions(config={}))
    with pytest.raises(StoragePermissionError, match=r"to abfss://box@team\.dfs\.core\.windows\.net/\.\.\. \(`pip"):
        storage.put("a", b"1")


def test_saving_is_refused_and_writes_nothing(server: tuple[str, Requests], tmp_path: Path) -> None:
    with pytest.raises(StoragePermissionError, match=r"read-only.*save to another storage"):
        ckptcore.save(f"{server[0]}/step_1", STATE)
    storage = storage_at(server[0])
    with pytest.raises(StoragePermissionError):
        storage.open_writer("a", 1)
    with pytest.raises(StoragePermissionError):
        storage.delete(["a"])
    assert list(tmp_path.iterdir()) == []


def test_ranges_of_objects_are_read(server: tuple[str, Requests], tmp_path: Path) -> None:
    data = bytes(range(256)) * 8000
    (tmp_path / "data").write_bytes(data)
    storage = storage_at(server[0])
    for start, stop in (
        (0, None),
        (0, 10),
        (7, 7),
        (5, 99),
        (2_000_000, 2_100_000),
        (2_048_000, None),
        (3_000_000, 4_000_000),
    ):
        assert storage.get("data", start, stop) == data[start:stop], (start, stop)
    assert storage.size("data") == len(data)
    memory = bytearray(300)
    view = memoryview(memory)
    storage.get_into("data", [(1_000_000, view[:100]), (50, view[100:200]), (0, view[200:])])
    assert memory == data[1_000_000:1_000_100] + data[50:150] + data[:100]
    with pytest.raises(CorruptCheckpointError, match="too short") as caught:
        storage.get_into("data", [(2_047_990, memoryview(bytearray(20)))])
    assert (caught.value.start, caught.value.stop) == (2_047_990, 2_048_010)
    (tmp_path / "empty").write_bytes(b"")
    assert storage.get("empty") == b""
    assert storage.size("empty") == 0


def test_a_server_without_ranges_sends_an_object_once(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(5_000_000))
    with serve_directory(tmp_path, PlainHandler) as (url, requests):
        storage = storage_at(url)
        reader = storage.open_reader("data")
        before = len(requests)
        for start in range(0, 4_000_000, 1_000_000):
            reader.get_into([(start, memoryview(bytearray(1000)))])
        assert len(requests) == before


def test_the_error_for_a_missing_directory_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckptcore.save(tmp_path / "step", STATE)
    with serve_directory(tmp_path, PlainHandler) as (url, _):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
        with pytest.raises(StorageError, match=r"temporary copy of '.*' in http.*missing.*set TMPDIR") as caught:
            ckptcore.load(f"{url}/step")
        assert not isinstance(caught.value, ObjectNotFoundError)
        monkeypatch.undo()
        assert ckptcore.load(f"{url}/step")["step"] == 3


@pytest.mark.system
def test_the_error_for_a_full_directory_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small tmpfs is not permitted here: {mounted.stderr.strip()}")
    try:
        ckptcore.save(tmp_path / "step", STATE)
        with serve_directory(tmp_path, PlainHandler) as (url, _):
            monkeypatch.setattr(tempfile, "tempdir", str(small))
            with pytest.raises(StorageFullError, match=r"temporary copy of '.*' in http.*small.*TMPDIR.*more space"):
                ckptcore.load(f"{url}/step")
            monkeypatch.undo()
            assert ckptcore.load(f"{url}/step")["step"] == 3
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_an_open_object_does_not_change(tmp_path: Path) -> None:
    for handler in (PlainHandler, RangesHandler):
        (tmp_path / "data").write_bytes(b"old" * 1000)
        with serve_directory(tmp_path, handler) as (url, _):
            storage = storage_at(url)
            reader = storage.open_reader("data")
            (tmp_path / "data").write_bytes(b"new" * 1000)
            memory = bytearray(3)
            try:
                reader.get_into([(0, memoryview(memory))])
            except StorageError as error:
                assert "412" in str(error)
            else:
                assert memory == b"old"


@pytest.mark.parametrize("key", [key for key in UNUSUAL_KEYS if "\t" not in key], ids=lambda key: ascii(key)[:30])
def test_unusual_keys(server: tuple[str, Requests], tmp_path: Path, key: str) -> None:
    path = tmp_path / "directory" / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"here")
    storage = storage_at(f"{server[0]}/directory")
    assert storage.get(key) == b"here"
    with pytest.raises(ObjectNotFoundError):
        storage.get("missing" + key)


def test_listings_come_from_the_index_page(tmp_path: Path) -> None:
    keys = ["a b.txt", "ü/%41", "deep/er/file", "plain"]
    for key in keys:
        path = tmp_path / "directory" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"1")
    with serve_directory(tmp_path, PlainHandler) as (url, _):
        storage = storage_at(f"{url}/directory")
        assert list(storage.list()) == sorted(keys)
        assert storage.list_names() == ["a b.txt", "deep/", "plain", "ü/"]
        with pytest.raises(ObjectNotFoundError):
            storage.size("deep")


class _Failing(PlainHandler):
    """Answers each path with the status in its name.

    ``/html`` is a page with links to other places. ``/short`` and ``/other`` are truncated or wrong answers.
    """

    def do_GET(self) -> None:
        name = self.path.strip("/").partition("/")[0]
        if name.isdigit():
            self.send_error(int(name))
        elif name == "short":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"only this")
            self.close_connection = True
        elif name == "other":
            self._send(206, b"0123", {"Content-Range": "bytes 5-8/10"})
        else:
            links = [
                "../up",
                "/etc/passwd",
                "http://elsewhere/x",
                ".",
                "..",
                "a//b",
                "%2e%2e",
                "ok",
                "?C=N;O=D",
                "x%00y",
                "a%2Fb",
            ]
            page = "".join(f'<a href="{link}">x</a>' for link in links)
            self._send(200, page.encode(), {"Content-Type": "text/html"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for header, value in headers.items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, StorageCredentialsError),
        (403, StoragePermissionError),
        (404, ObjectNotFoundError),
        (410, ObjectNotFoundError),
        (429, StorageThrottledError),
        (500, StorageError),
        (503, StorageThrottledError),
    ],
)
def test_each_status_has_its_own_error(tmp_path: Path, status: int, error: type[CheckpointError]) -> None:
    with serve_directory(tmp_path, _Failing) as (url, _):
        storage = storage_at(url)
        for read in (storage.get, storage.size):
            with pytest.raises(error) as caught:
                read(str(status))
            assert type(caught.value) is error
            assert len(str(caught.value).splitlines()) == 1


def test_a_server_with_too_many_requests(tmp_path: Path) -> None:
    """The load succeeds on a second try."""
    ckptcore.save(tmp_path / "c", STATE)
    refusing = [True]

    class Throttling(RangesHandler):
        def do_GET(self) -> None:
            if refusing:
                self.send_error(429)
            else:
                super().do_GET()

    with serve_directory(tmp_path, Throttling) as (url, _):
        with pytest.raises(StorageThrottledError, match="; use fewer processes at once, and try again"):
            ckptcore.load(f"{url}/c")
        refusing.clear()
        loaded = ckptcore.load(f"{url}/c")
    assert np.array_equal(loaded["w"], STATE["w"]) and loaded["step"] == 3


def test_broken_answers_are_errors(tmp_path: Path) -> None:
    with serve_directory(tmp_path, _Failing) as (url, _):
        storage = storage_at(url)
        for key in ("short", "other"):
            with pytest.raises(StorageError):
                storage.get(key, 2, 50)
        assert storage.list_names("html") == ["ok"]


def test_a_refused_connection_is_not_reported_as_a_missing_object() -> None:
    port = free_port()
    storage = storage_at(f"http://127.0.0.1:{port}/directory")
    for read in (storage.get, storage.size):
        with pytest.raises(StorageError) as caught:
            read("key")
        assert not isinstance(caught.value, ObjectNotFoundError)


def test_a_url_with_a_query_is_refused() -> None:
    with pytest.raises(InvalidLocationError, match="query"):
        ckptcore.load("https://host/run?token=1/checkpoint")


def test_remedies_for_a_url_with_a_query(tmp_path: Path) -> None:
    """Characters of queries in directory names must be escaped. Credentials are passed as headers."""
    ckptcore.save(tmp_path / "a?b#c" / "run", STATE)

    class Guarded(RangesHandler):
        def do_GET(self) -> None:
            if self.headers.get("Authorization") == "Bearer token":
                super().do_GET()
            else:
                self.send_error(401)

    with serve_directory(tmp_path, Guarded) as (url, _):
        with pytest.raises(
            InvalidLocationError, match="it has a query or a fragment; write %3F and %23 for . and #"
        ) as caught:
            ckptcore.load(f"{url}/a?b#c/run")
        assert "pass credentials as Context(storage={'http': {'headers': {...}}})" in str(caught.value)
        with pytest.raises(StorageCredentialsError, match="; provide valid credentials for this storage"):
            ckptcore.load(f"{url}/a%3Fb%23c/run")
        context = ckptcore.Context(storage={"http": {"headers": {"Authorization": "Bearer token"}}})
        loaded = ckptcore.load(f"{url}/a%3Fb%23c/run", context=context)
    assert np.array_equal(loaded["w"], STATE["w"]) and loaded["step"] == 3
