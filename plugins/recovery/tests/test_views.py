"""Views: who holds entries and blobs, and what is read from bytes."""

from __future__ import annotations

import json
import zlib
from collections import Counter

import pytest
from ckptcore_recovery.peers.views import Member, View, place
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.errors import StorageError


def members(domains: list[int]) -> list[Member]:
    """Return members in domains."""
    return [Member(f"{number:016x}", "127.0.0.1", number, f"rack {domain}") for number, domain in enumerate(domains)]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.integers(1, 5))
def test_members_that_hold_something_are_in_different_domains(domains: list[int], count: int) -> None:
    everyone = members(domains)
    by_id = {member.id: member for member in everyone}
    placed = place(everyone, count)
    assert set(placed) == set(by_id)
    for name, holders in placed.items():
        assert holders[0] == name
        assert len({by_id[holder].domain for holder in holders}) == len(holders) == min(count, len(set(domains)))


@pytest.mark.parametrize(("racks", "count"), [(1000, 2), (1000, 6), (50, 3), (6, 6)])
def test_members_of_equal_racks_hold_nearly_the_same(racks: int, count: int) -> None:
    placed = place(members([number % racks for number in range(1000 // racks * racks)]), count)
    held = Counter([name for holders in placed.values() for name in holders])
    assert max(held.values()) <= min(held.values()) + 3


@pytest.mark.parametrize("hosts", [2, 3, 5, 7, 16, 17])
@pytest.mark.parametrize("count", [2, 3, 6])
def test_hosts_that_are_domains_hold_the_same(hosts: int, count: int) -> None:
    placed = place(members(list(range(hosts))), count)
    held = Counter([name for holders in placed.values() for name in holders])
    assert set(held.values()) == {min(count, hosts)}


def test_keys_are_spread_over_all_members_but_locks_are_together() -> None:
    view = View(1, members(list(range(50))), copies=1)
    decided = Counter([view.home(f"run/7/part-{number}")[0] for number in range(5000)])
    assert len(decided) == 50
    assert max(decided.values()) < 2 * 5000 / 50
    assert {view.home(key) for key in ("run/.ckptcore/owner.json", ".ckptcore/pins/5", "run/.ckptcore/")} == {
        view.home(".ckptcore/x")
    }


def test_the_next_member_decides_about_a_key_if_the_first_is_lost() -> None:
    view = View(1, members([0, 1, 2, 3]), copies=2)
    first, second, third = view.home("key")
    assert view.deciding("key") == first
    assert view.deciding("key", [first]) == second
    assert view.deciding("key", [second, first]) == third
    assert view.deciding("key", [third, second, first]) is None
    assert view.knows_all_without([first, second])
    assert not view.knows_all_without([first, second, third])


def test_a_view_is_the_same_after_it_was_sent() -> None:
    left = Member("left", "10.0.0.9", 5, "rack 9", is_reader=True)
    view = View(3, [*members([0, 0, 1]), Member("alone", "10.0.0.1", 1, "alone"), left], copies=2, needed=4)
    received = View.decode(view.encode())
    assert (received.epoch, received.copies, received.needed) == (3, 2, 4)
    assert received.members == view.members
    assert left not in received.writers


@pytest.mark.parametrize(
    "stated",
    [
        {}, [], None, "view",
        {"epoch": 1, "members": [], "copies": 1, "needed": 1},
        {"epoch": 1, "members": [["id", "host", 1, None, True]], "copies": 1, "needed": 1},
        {"epoch": 1, "members": [["id", "host", "port", None, False]], "copies": 1, "needed": 1},
        {"epoch": 1, "members": [["id"]], "copies": 1, "needed": 1},
        {"epoch": None, "members": [["id", "host", 1, None, False]], "copies": 1, "needed": 1},
    ],
    ids=str,
)  # fmt: skip
def test_an_invalid_view_is_an_error(stated: object) -> None:
    with pytest.raises(StorageError, match="invalid view"):
        View.decode(zlib.compress(json.dumps(stated).encode()))


def test_bytes_that_grow_without_end_are_no_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptcore_recovery.peers.views._VIEW_BYTES", 1 << 16)
    for encoded in (zlib.compress(b" " * (1 << 24)), b"", b"no view", zlib.compress(b"\xff")):
        with pytest.raises(StorageError, match="invalid view"):
            View.decode(encoded)
