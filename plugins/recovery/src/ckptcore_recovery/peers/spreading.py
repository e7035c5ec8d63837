"""Requests to all members of a job's memory: servers pass them on in a tree, so each sends few messages.

The server that gets a request for n members sends it to the first of the second half of them, with that half, and goes
on with the first half until it is alone. So a server receives one message, and sends at most log2(n).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from ckptcore.errors import ObjectNotFoundError, StorageError
from ckptcore_recovery.peers.connections import ServerLostError
from ckptcore_recovery.peers.host_memory import Entry
from ckptcore_recovery.peers.messages import Header
from ckptcore_recovery.peers.session import Session, lost_memory
from ckptcore_recovery.peers.views import is_internal

if TYPE_CHECKING:
    from ckptcore.model.tree import JSON

PAGE_BYTES: Final = 1 << 20
"""Items are sent in pages of about this size."""

_FEW: Final = 8
"""Up to this number, objects are deleted one after the other."""


class Reached(NamedTuple):
    """The answer of some members.

    Attributes:
        items: keys with sizes, in the order of the keys.
        lost: the ids of members that do not answer.
        more: True if there are more items after the last one.
    """

    items: Sequence[Any] = ()
    lost: Sequence[str] = ()
    more: bool = False

    def encode(self) -> bytes:
        """Return the answer as JSON."""
        return json.dumps([list(self.items), list(self.lost), self.more]).encode("ascii")

    @classmethod
    def decode(cls, encoded: bytes) -> Self:
        """Read an answer from JSON.

        Raises:
            StorageError: it is not valid.
        """
        try:
            items, lost, more = json.loads(encoded)
            return cls([(str(key), int(size)) for key, size in items], [str(name) for name in lost], bool(more))
        except (TypeError, ValueError) as error:
            raise StorageError(f"invalid answer of a memory server: {error}") from error


class Part(NamedTuple):
    """Some of the members that get a request: `size` of `View.writers`, from the number `first`, in a circle."""

    first: int
    size: int

    def divide(self) -> tuple[Part, Part]:
        """Return the two halves."""
        half = self.size // 2
        return Part(self.first, self.size - half), Part(self.first + self.size - half, half)


def ask_part(session: Session, request: Header, payload: bytes, part: Part) -> Reached:
    """Send a request to some members: to the first that answers, which passes it on to the others."""
    writers = session.view.writers
    lost: list[str] = []
    first, count = part
    while count:
        member = writers[first % len(writers)]
        header = {"op": "spread", "request": request, "first": first % len(writers), "count": count}
        try:
            _, answer = session.server(member).call(header, payload)
        except ServerLostError:
            lost.append(member.id)
            first, count = first + 1, count - 1
            continue
        reached = Reached.decode(bytes(answer))
        return reached._replace(lost=[*lost, *reached.lost])
    return Reached(lost=lost)


def pass_on(session: Session, request: Header, payload: bytes, part: Part, own: Callable[[bytes], Reached]) -> Reached:
    """On the server that is the first of a part, pass a request on to the others, and return all answers.

    Args:
        session: the session of the server.
        request: the request.
        payload: its payload; for "delete", the keys of objects, of which each member gets those that it decides about.
        part: the members.
        own: does what is requested on this server.
    """
    is_divided = request["op"] == "delete"
    sent: list[tuple[Part, bytes]] = []
    while part.size > 1:
        part, other = part.divide()
        share = _keys_of(session, payload, other) if is_divided else payload
        if share or not is_divided:
            sent.append((other, share))
    own_share = _keys_of(session, payload, part) if is_divided else payload
    with ThreadPoolExecutor(max(1, len(sent))) as threads:
        answers = [threads.submit(ask_part, session, request, share, other) for other, share in sent]
        reached = [own(own_share)] if own_share or not is_divided else []
    return _merge([*reached, *[answer.result() for answer in answers]])


def _keys_of(session: Session, payload: bytes, part: Part) -> bytes:
    """Return the keys that the members of a part decide about, as JSON; empty if there are none."""
    view = session.view
    keys = [key for key in json.loads(payload) if (view.home_number(key) - part.first) % len(view.writers) < part.size]
    return json.dumps(keys).encode("ascii") if keys else b""


def _merge(answers: Sequence[Reached]) -> Reached:
    """Put answers together. An answer that has more is a whole page, so the result does not go beyond its end."""
    items = sorted([item for answer in answers for item in answer.items])
    lost = [name for answer in answers for name in answer.lost]
    return page_of(items, lost, more=any(answer.more for answer in answers))


def page_of(items: Sequence[tuple[str, int]], lost: Sequence[str] = (), *, more: bool = False) -> Reached:
    """Return the first items, up to the size of a page."""
    nbytes = 0
    for number, (key, _) in enumerate(items):
        nbytes += len(json.dumps(key)) + 24
        if nbytes > PAGE_BYTES and number + 1 < len(items):
            return Reached(items[: number + 1], lost, more=True)
    return Reached(items, lost, more)


def spread(session: Session, request: Header, payload: bytes) -> None:
    """Send a request to all members.

    Raises:
        StorageError: a member is lost.
    """
    reached = ask_part(session, request, payload, _from_here(session))
    if reached.lost:
        by_id = session.view.by_id
        lost = [by_id[name] for name in reached.lost[:20] if name in by_id]
        places = ", ".join([f"{member.host}:{member.port}" for member in lost])
        is_default = any(member.host.startswith("127.") for member in lost)
        raise StorageError(
            f"{len(reached.lost)} memory servers of job {session.job} do not answer: {places}"
            + (". Pass interface= with the address of each host that the others reach" if is_default else "")
        )


def sizes_below(session: Session, below: str) -> Mapping[str, int]:
    """Return the sizes of the objects whose keys begin with `below`, in bytes, in the order of the keys.

    Raises:
        StorageError: all members that know some of the objects are lost.
    """
    lost: set[str] = set()
    while True:
        sizes, newly_lost = _pages(session, below, sorted(lost))
        if newly_lost <= lost:
            return sizes
        lost |= newly_lost  # others answer for them
        if not session.view.knows_all_without(lost):
            raise lost_memory(session, lost)


def _pages(session: Session, below: str, lost: Sequence[str]) -> tuple[dict[str, int], set[str]]:
    sizes: dict[str, int] = {}
    newly_lost: set[str] = set()
    after = None
    while True:
        request = {"op": "sizes", "below": below, "after": after, "lost": lost, "epoch": session.view.epoch}
        if is_internal(below):
            _, answer = session.ask_home(below, {**request, "lost": None})
            page = Reached.decode(bytes(answer))
        else:
            page = ask_part(session, request, b"", _from_here(session))
        sizes.update(page.items)
        newly_lost.update(page.lost)
        if not page.more:
            return sizes, newly_lost
        after = page.items[-1][0]


def _from_here(session: Session) -> Part:
    """Return all members, beginning with that of this host."""
    writers = session.view.writers
    own = [number for number, member in enumerate(writers) if session.is_local(member)]
    return Part(own[0] if own else 0, len(writers))


def delete(session: Session, keys: Sequence[str]) -> None:
    """Delete objects, and free their blobs. Missing ones are no error.

    Raises:
        SaveLostError: a later incarnation of the job has taken over.
        StorageError: a member failed. Some objects may be deleted.
    """
    if len(keys) <= _FEW:
        for key in keys:
            _delete(session, key)
        return
    ordered = sorted(keys, key=session.view.home_number)  # so that each page concerns few members
    request = {"op": "delete", "epoch": session.view.epoch}
    page: list[str] = []
    nbytes = 0
    for number, key in enumerate(ordered):
        page.append(key)
        nbytes += len(json.dumps(key)) + 2
        if nbytes > PAGE_BYTES or number + 1 == len(ordered):
            spread(session, request, json.dumps(page).encode("ascii"))
            page, nbytes = [], 0


def _delete(session: Session, key: str) -> None:
    try:
        session.find(key)
    except ObjectNotFoundError:
        return
    _, present = session.replace(key, Entry(0, is_deleted=True), None)
    if present is not None and present.blob:
        session.drop_blob(present)


def delete_each(session: Session, keys: Sequence[JSON]) -> None:
    """On a server, delete the objects that it decides about, one after the other.

    Raises:
        TypeError: a key is no string.
        The errors of `delete`.
    """
    for key in keys:
        if not isinstance(key, str):
            raise TypeError(f"{key!r} is no key")
        _delete(session, key)
