"""Requests to all members: listings and deletions go through a tree of servers, also if some of them are lost."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
from ckptcore_recovery.peers.joining import MemoryOptions
from ckptcore_recovery.peers.session import Session
from ckptcore_recovery.peers.spreading import Part
from ckptcore_recovery.peers.storage import PeerStorage

from ckptcore.errors import ObjectNotFoundError, SaveLostError, StorageError
from plugins.recovery.tests.counted_hosts import CountedHosts

KEYS = sorted([f"run/{step}/part-{number:03}" for step in range(3) for number in range(40)])


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CountedHosts:
    """Return hosts without servers."""
    return CountedHosts(tmp_path, monkeypatch)


def join(hosts: CountedHosts, count: int) -> Session:
    """Start a job that has objects. Return the process on the second host."""
    session = hosts.join(*[f"host-{number}" for number in range(count)], options=MemoryOptions(1 << 30))[1]
    for number, key in enumerate(KEYS):
        storage(session).put(key, bytes(number))
    hosts.most()
    return session


def storage(session: Session) -> PeerStorage:
    """Return the whole memory of a job as one of its processes uses it."""
    return PeerStorage("job", "", session)


@pytest.mark.parametrize("count", [2, 3, 7, 16])
def test_a_listing_costs_each_host_few_messages(hosts: CountedHosts, count: int) -> None:
    session = join(hosts, count)
    assert storage(session).list_sizes() == {key: number for number, key in enumerate(KEYS)}
    assert hosts.messages.total() <= 2 * count, "one to each, counted by both sides"
    assert max(hosts.messages.values()) <= 2 + math.log2(count) + 1
    assert storage(session).list_names("run") == ["0/", "1/", "2/"]
    assert list(storage(session).list("run/1")) == KEYS[40:80]
    assert list(storage(session).list("run/9")) == []


def test_locks_are_listed_with_one_message(hosts: CountedHosts) -> None:
    session = join(hosts, 8)
    storage(session).put("run/.ckptcore/pins/1", b"1")
    hosts.most()
    assert list(storage(session).list("run/.ckptcore")) == ["run/.ckptcore/pins/1"]
    assert hosts.messages.total() <= 2
    assert "run/.ckptcore/pins/1" in storage(session).list()


def test_a_listing_is_whole_if_hosts_are_lost(hosts: CountedHosts) -> None:
    session = join(hosts, 9)
    for lost in ("host-0", "host-8", "host-4"):
        server = hosts.servers.pop(lost)
        assert list(storage(session).list()) == KEYS
        hosts.servers[lost] = server
    own = session.view.home(KEYS[0])
    for name in own:
        del hosts.servers[name.removeprefix("id of ")]
    with pytest.raises(StorageError, match="memory of job job is lost"):
        storage(session).list()
    with pytest.raises(StorageError, match="memory of job job is lost"):
        storage(session).get(KEYS[0])


@pytest.mark.parametrize("page_bytes", [1, 200, 1000])
def test_listings_and_deletions_come_in_pages(
    hosts: CountedHosts, page_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptcore_recovery.peers.spreading.PAGE_BYTES", page_bytes)
    session = join(hosts, 5)
    assert list(storage(session).list()) == KEYS
    storage(session).delete(KEYS[1:])
    assert list(storage(session).list()) == KEYS[:1]


def test_a_deletion_costs_each_host_its_share(hosts: CountedHosts) -> None:
    session = join(hosts, 8)
    storage(session).delete([*KEYS[:80], "absent"])
    decided = Counter([session.view.home(key)[0] for key in KEYS[:80]])
    # A host finds, reserves and stores what it decides about, and stores what its neighbours decide about.
    assert max(hosts.messages.values()) <= 8 * max(decided.values()) + 2 + math.log2(8)
    assert list(storage(session).list()) == KEYS[80:]
    with pytest.raises(ObjectNotFoundError):
        storage(session).get(KEYS[0])
    storage(session).delete(KEYS)
    assert list(storage(session).list()) == []


def test_a_deletion_fails_if_a_host_is_lost(hosts: CountedHosts) -> None:
    session = join(hosts, 4)
    del hosts.servers["host-3"]
    with pytest.raises(StorageError):
        storage(session).delete(KEYS)
    left = list(storage(session).list())
    assert set(left) <= set(KEYS)
    for key in left:
        storage(session).get(key)


def test_an_earlier_incarnation_cannot_delete_through_other_servers(hosts: CountedHosts) -> None:
    old = join(hosts, 4)
    new, *_ = hosts.join("host-0", "host-2", "host-3", options=MemoryOptions(1 << 30))
    with pytest.raises((SaveLostError, StorageError)):
        storage(old).delete(KEYS)
    assert list(storage(new).list()) == KEYS


def test_a_part_is_divided_until_one_member_is_left() -> None:
    parts = [Part(5, 13)]
    while any(part.size > 1 for part in parts):
        parts = [half for part in parts for half in (part.divide() if part.size > 1 else (part,))]
    assert sorted(parts) == [Part(first, 1) for first in range(5, 18)]
