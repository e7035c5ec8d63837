"""Copies that are made again in the background wait for the reads of their process, and end with its session."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from ckptcore_recovery.peers import blobs, copies
from ckptcore_recovery.peers import session as session_module
from ckptcore_recovery.peers.host_memory import Entry
from ckptcore_recovery.peers.session import Reads, Session
from ckptcore_recovery.peers.storage import PeerStorage

from plugins.recovery.tests.job_hosts import Hosts

LARGE = bytes(range(256)) * (9 << 12)  # more than two pieces


def test_work_in_the_background_waits_for_running_reads() -> None:
    reads, order, started = Reads(), list[str](), threading.Event()
    reads.hurry()

    def work() -> None:
        started.set()
        assert reads.wait_for_end()
        order.append("copy")

    thread = threading.Thread(target=work)
    with reads.running():
        thread.start()
        started.wait()
        order.append("read")
    thread.join()
    assert order == ["read", "copy"]


def test_work_in_the_background_ends_while_a_read_runs() -> None:
    reads = Reads()
    with reads.running():
        reads.stop()
        assert not reads.wait_for_end()


@pytest.mark.system
def test_a_session_that_is_closed_makes_no_more_copies(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = hosts.join("a", "b")
    PeerStorage(first.job, "", first).put("large", LARGE)
    hosts.lose("b")
    monkeypatch.setattr(session_module, "_QUIET_SECONDS", 3600.0)
    for session in hosts.start("a", "c"):
        session.close()
    assert blob_files(hosts, "c") == []
    again, _ = hosts.join("a", "c")
    assert len(again.find("large").holders) == 2


@pytest.mark.system
@pytest.mark.parametrize("change", ["replace", "replace by a small one", "delete"])
def test_a_copy_of_an_object_that_changes_meanwhile_is_freed(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    first, _ = hosts.join("a", "b")
    PeerStorage(first.job, "", first).put("large", LARGE)
    hosts.lose("b")
    copied, fetch = list[str](), blobs.fetch_blob

    def fetch_and_change(session: Session, key: str, entry: Entry, place: int) -> None:
        fetch(session, key, entry, place)
        copied.append(entry.blob)
        storage = PeerStorage(session.job, "", session)
        if change == "delete":
            storage.delete(["large"])
        else:
            storage.put("large", LARGE[::-1] if change == "replace" else b"small")

    monkeypatch.setattr(copies, "fetch_blob", fetch_and_change)
    (session, _) = hosts.join("a", "c")
    assert len(copied) == 1
    left = {path.name for name in "ac" for path in blob_files(hosts, name)}
    assert left == ({session.find("large").blob} if change == "replace" else set())
    if change == "replace":
        assert all(len(blob_files(hosts, name)) == 1 for name in "ac")
        hosts.lose("a")
        (alone,) = hosts.join("c")
        assert PeerStorage(alone.job, "", alone).get("large") == LARGE[::-1]


def blob_files(hosts: Hosts, host: str) -> list[Path]:
    """Return the files of the complete blobs of a host."""
    server = hosts.server(host)
    assert server is not None
    return [path for path in (server.directory / "blobs").iterdir() if not path.suffix]


@pytest.mark.system
@pytest.mark.parametrize("fault", ["full", "killed"])
def test_a_copy_that_cannot_be_made_is_made_by_the_next_start(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    limit = hosts.options.limit
    first, _ = hosts.join("a", "b")
    PeerStorage(first.job, "", first).put("large", LARGE)
    hosts.lose("b")
    fill, fills = blobs.BlobReader.fill, list[int]()

    def kill_and_fill(self: blobs.BlobReader, offset: int, buffer: memoryview) -> None:
        fills.append(offset)
        if len(fills) == 1:
            hosts.kill("c")
        fill(self, offset, buffer)

    with monkeypatch.context() as patch:
        if fault == "killed":
            patch.setattr(blobs.BlobReader, "fill", kill_and_fill)
        else:
            hosts.options = replace(hosts.options, limit=len(LARGE))  # and no room for its files
        session, spare = hosts.join("a", "c")
    assert bool(fills) == (fault == "killed")
    assert "too few copies" in caplog.text
    assert blob_files(hosts, "c") == []
    for process in (session, spare):
        assert PeerStorage(process.job, "", process).get("large") == LARGE
    hosts.options = replace(hosts.options, limit=limit)
    hosts.join("a", "c")
    assert len(blob_files(hosts, "c")) == 1
    hosts.lose("a")
    (alone,) = hosts.join("c")
    assert PeerStorage(alone.job, "", alone).get("large") == LARGE


_AFTER_MAIN = """
import sys, threading
from pathlib import Path
from ckptcore_recovery.peers.joining import MemoryOptions
from ckptcore_recovery.peers.storage import PeerStorage
from plugins.recovery.tests.job_hosts import Hosts

def train():
    threading.main_thread().join()
    hosts = Hosts(Path(sys.argv[1]), MemoryOptions(1 << 26))
    try:
        first, *_ = hosts.join("a", "b", "left")
        PeerStorage(first.job, "", first).put("large", bytes(1 << 22))
        hosts.forget()
        hosts.lose("b")
        again, *_ = hosts.join("a", "c")
        print(len(again.find("large").holders))
    finally:
        hosts.close()

threading.Thread(target=train).start()
"""


@pytest.mark.system
def test_a_job_starts_and_copies_after_the_main_thread_has_ended(tmp_path: Path) -> None:
    """As one that trains on another thread may do. The executors of `concurrent.futures` take no more work then."""
    done = subprocess.run(
        [sys.executable, "-c", _AFTER_MAIN, str(tmp_path)], capture_output=True, text=True, check=False, timeout=600
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
