"""Copies that are made again in the background wait for the reads of their process, and end with its session."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from ckptcore_recovery.peers import blobs, copies
from ckptcore_recovery.peers import session as session_module
from ckptcore_recovery.peers.host_memory import Entry
from ckptcore_recovery.peers.joining import MemoryOptions
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
def test_a_session_that_is_closed_makes_no_more_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(tmp_path / "hosts", MemoryOptions(limit=1 << 28, idle_seconds=60.0))
    try:
        first, _ = hosts.join("a", "b")
        PeerStorage(first.job, "", first).put("large", LARGE)
        hosts.lose("b")
        monkeypatch.setattr(session_module, "_QUIET_SECONDS", 3600.0)
        for session in hosts.start("a", "c"):
            session.close()
        server = hosts.server("c")
        assert server is not None
        assert list((server.directory / "blobs").iterdir()) == []
        again, _ = hosts.join("a", "c")
        assert len(again.find("large").holders) == 2
    finally:
        hosts.close()


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
