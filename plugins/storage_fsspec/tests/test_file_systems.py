"""Each process opens its own file systems, and each thread its own if necessary.

File systems that other code opened are not changed.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import fsspec
import pytest
from ckptcore_fsspec.file_systems import Connection

from plugins.storage_fsspec.tests.web_servers import RangesHandler, serve_directory


def test_threads_share_only_asynchronous_file_systems() -> None:
    for protocol, shared in (("http", True), ("memory", False)):
        connection = Connection(f"{protocol}://host/directory", {})
        mine = connection.get()
        assert connection.get() is mine
        assert Connection(f"{protocol}://host/other", {}).get() is mine
        others: list[object] = []
        thread = threading.Thread(target=lambda of=connection, to=others: to.append(of.get()))
        thread.start()
        thread.join()
        assert (others[0] is mine) is shared


def test_other_options_give_another_file_system() -> None:
    plain = Connection("http://host/a", {}).get()
    assert Connection("http://host/a", {"headers": {"A": "1"}}).get() is not plain


def test_listing_caches_of_other_code_are_not_changed() -> None:
    theirs = fsspec.filesystem("http")
    ours = Connection("http://host/a", {}).get()
    assert ours is not theirs
    assert theirs.dircache.use_listings_cache
    assert not ours.dircache.use_listings_cache  # type: ignore[attr-defined]  # it is a DirCache


@pytest.mark.system
def test_a_forked_child_can_read(tmp_path: Path) -> None:
    """A child opens its own file system. That of the parent needs a thread, which a fork does not copy."""
    (tmp_path / "data").write_bytes(b"read me")
    with serve_directory(tmp_path, RangesHandler) as (url, _):
        from ckptcore_fsspec.opening import open_url

        from ckptcore.protocols import StorageOptions

        storage = open_url(url, StorageOptions())
        assert storage.get("data") == b"read me"
        child = os.fork()
        if not child:
            try:
                os._exit(0 if storage.get("data") == b"read me" else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
