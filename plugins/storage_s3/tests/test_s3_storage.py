"""The storage conformance tests on S3 with two servers, and uploads in parts."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from ckptcore_obstore.storage import ObjectStoreDirectory
from ckptcore_s3.plugin import S3Plugin
from ckptcore_s3.testing import S3Server
from ckptcore_testing import NewObjectTests, StorageBackendTests, UploadsTests

from ckptcore.protocols import StorageBackend, StorageOptions


class OnMiniStack:
    """Tests on a server that stores objects in files, with a new bucket for each test."""

    @pytest.fixture(autouse=True)
    def use_server(self, ministack: S3Server) -> None:
        """Create the bucket."""
        self.plugin = S3Plugin()
        self.server = ministack
        self.bucket = ministack.create_bucket()

    def open(self, directory: str) -> ObjectStoreDirectory:
        """Return the directory with this name in the bucket."""
        config = {**self.server.options, "part_bytes": 5 << 20}
        storage = self.plugin.open(f"s3://{self.bucket}/{directory}", StorageOptions(config=config))
        assert isinstance(storage, ObjectStoreDirectory)
        return storage


class TestMiniStack(OnMiniStack, StorageBackendTests):
    """Conformance tests."""

    examples = 5


class TestNewObjectsOnMiniStack(OnMiniStack, NewObjectTests):
    """Conformance tests of writers of new objects."""


class TestUploadsOnMiniStack(OnMiniStack, UploadsTests):
    """Conformance tests of unfinished uploads."""

    upload_bytes = 11 << 20


@pytest.mark.slow
class TestMoto(StorageBackendTests):
    """Conformance tests on another server."""

    examples = 3

    @pytest.fixture(autouse=True)
    def use_server(self, moto: S3Server) -> None:
        """Create the bucket."""
        self.server = moto
        self.bucket = moto.create_bucket()

    def open(self, directory: str) -> ObjectStoreDirectory:
        """Return the directory with this name in the bucket."""
        config = {**self.server.options, "part_bytes": 5 << 20}
        storage = S3Plugin().open(f"s3://{self.bucket}/{directory}", StorageOptions(config=config))
        assert isinstance(storage, ObjectStoreDirectory)
        return storage

    # moto checks a condition and stores the object in two steps, in threads without a lock (`moto.s3.responses`). So
    # concurrent requests are tested only on MiniStack. Here the clients run one after the other.

    def test_only_one_of_many_concurrent_creations_succeeds(self, storage: StorageBackend) -> None:
        """Runs one client after the other."""
        self.threads = 1
        super().test_only_one_of_many_concurrent_creations_succeeds(storage)

    def test_concurrent_conditional_puts_lose_no_update(self, storage: StorageBackend) -> None:
        """Runs one client after the other."""
        self.threads = 1
        super().test_concurrent_conditional_puts_lose_no_update(storage)


@pytest.mark.slow
class TestUploadsOnMoto(UploadsTests):
    """Conformance tests of unfinished uploads, on another server."""

    upload_bytes = 11 << 20
    use_server = TestMoto.use_server
    open = TestMoto.open


@pytest.mark.slow
class TestNewObjectsOnMoto(NewObjectTests):
    """Conformance tests of writers of new objects, on another server."""

    use_server = TestMoto.use_server
    open = TestMoto.open


class TestMore(OnMiniStack):
    """Further tests, which apply only to object stores."""

    def test_capabilities_contain_concurrency_and_part_size(self) -> None:
        storage = self.open("run")
        assert storage.capabilities.concurrency > 1
        assert storage.capabilities.part_bytes == 5 << 20

    @pytest.mark.slow
    def test_lists_of_several_pages(self) -> None:
        storage = self.open("run")
        keys = [f"a/{number:04}" for number in range(1003)]
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda key: storage.put(key, b""), keys))
        assert list(storage.list()) == keys
        assert list(storage.list_names("a")) == [key[2:] for key in keys]
        storage.delete(keys)
        assert list(storage.list()) == []

    def test_unusual_keys_of_other_software_are_not_listed(self) -> None:
        """Consoles create empty objects for directories, and some programs write keys with empty parts."""
        self.open("run").put("a/real", b"1")
        plain = self.open("run").bucket.plain
        for key in ("run/", "run/a/", "run/a//b"):
            plain.send("PUT", key)
        storage = self.open("run")
        assert list(storage.list()) == ["a/real"]
        assert list(storage.list_names()) == ["a/"]
        assert list(storage.list_names("a")) == ["real"]

    def test_complete_parts_are_not_buffered(self) -> None:
        writer = self.open("run").open_writer("a", 15 << 20)
        data = bytes(10 << 20)
        held = writer.held_bytes
        writer.write_at(0, data)
        assert held == writer.held_bytes == 0
        writer.write_at(10 << 20, bytes(1 << 20))
        assert writer.held_bytes == 5 << 20
        writer.write_at(11 << 20, bytes(4 << 20))
        assert writer.held_bytes == 0
        writer.finish()

    def test_a_forked_child_can_read(self) -> None:
        self.open("run").put("a", b"1")
        self.open("run").get("a")
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.write(writing, self.open("run").get("a"))
            finally:
                os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        assert os.read(reading, 10) == b"1"
        os.close(reading)
