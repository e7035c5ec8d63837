"""Whether a storage keeps the conditions of puts, on which commits without rename rest, and what to do where it does not."""

from __future__ import annotations

import urllib.parse
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ckptcore.commit.root import ROOT_KEY
from ckptcore.commit.subdirectory import Subdirectory
from ckptcore.context import WithoutConditions
from ckptcore.errors import AtomicityError, ConditionFailedError, ObjectNotFoundError, SaveLostError
from ckptcore.io.object_writes import LooksBefore
from ckptcore.protocols import IF_ABSENT, IfAbsent, IfTag, ObjectWriter, PutCondition, StorageBackend

if TYPE_CHECKING:
    from ckptcore.commit.location import Location

__all__ = ["Conditions", "refuse_conditions"]


class Conditions:
    """What was found out of the conditions of storages, so that each is tried once. A Context has one. Any thread."""

    def __init__(self, without: WithoutConditions = "refuse") -> None:
        """Know nothing yet; `without` says what to do on a storage that has no conditions."""
        self._without: Final = without
        self._kept: dict[str, bool] = {}

    def open(self, location: Location) -> Location:
        """A location as a save uses it: where markers are asked for, its storage looks where it cannot put conditionally."""
        return replace(location, parent=self.storage(location.parent, location.absolute))

    def storage(self, storage: StorageBackend, url: str) -> StorageBackend:
        """A storage as it is used by who relies on conditions.

        Args:
            storage: one without real directories.
            url: of what is opened, or of something in the same bucket.
        """
        if self._without == "refuse":
            return storage
        return _Looks(storage) if self._kept.get(_service(url)) is False else _LooksWhereItMust(storage)

    def try_out(self, location: Location, root: bytes, tag: str) -> Location:
        """Find out whether the storage of a location keeps conditions, unless that is known; the location as it is used from now on.

        Two small requests, which must fail: the root that stands there would be put in its own place, on conditions that are
        not true.

        Args:
            location: as `open` gave it.
            root: the bytes of the root there.
            tag: of it.

        Raises:
            AtomicityError: it ignores them, and nothing says what to do then.
            SaveLostError: the root was deleted meanwhile, so that it could be put; it is removed again.
        """
        if isinstance(location.parent, _Looks):
            return location
        service = _service(location.absolute)
        if service not in self._kept:
            try:
                kept = all(_is_kept(location, root, condition) for condition in (IF_ABSENT, IfTag(_other_tag(tag))))
            except AtomicityError as error:
                raise refuse_conditions(location, f"its storage cannot put on conditions: {error}") from error
            if service:
                self._kept[service] = kept
            if kept:
                return location
        elif self._kept[service]:
            return location
        if self._without == "refuse":
            raise refuse_conditions(
                location, "its storage ignores the conditions of puts: one 'if absent' replaced an object"
            )
        return replace(location, parent=_Looks(location.parent))


def refuse_conditions(location: Location, found: str) -> AtomicityError:
    """The error for a location where nothing keeps two saves apart."""
    return AtomicityError(
        f"cannot save to {location.display}: {found}, so that two saves at once, or one that stood still, could destroy a "
        "checkpoint. Use a storage that keeps conditions (of an S3 service, one that knows If-None-Match and If-Match); or, where only "
        "one process ever saves to a location at a time, pass Context(io=IOOptions(without_conditions='marker')). Nothing was saved"
    )


def _service(url: str) -> str:
    """The scheme and host (bucket) of a URL; empty where there is none."""
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}" if parts.scheme else ""


def _is_kept(location: Location, root: bytes, condition: PutCondition) -> bool:
    if _is_refused(location.store, root, condition):
        return True
    if not _is_refused(location.store, root, condition):
        return False
    # Once it is there again, the condition is kept: it was not there before. Nothing else is: whoever deletes does the root last.
    location.store.delete([ROOT_KEY])
    raise SaveLostError(
        f"what stood at {location.display} was deleted at the same time; look at what is there and call again. Nothing was changed"
    )


def _is_refused(store: StorageBackend, root: bytes, condition: PutCondition) -> bool:
    try:
        store.put(ROOT_KEY, root, condition=condition)
    except (ConditionFailedError, ObjectNotFoundError):
        return True
    return False


def _other_tag(tag: str) -> str:
    """A tag that is not this one, and has its form: services refuse what is none of theirs before they look."""
    for place in range(len(tag) - 1, -1, -1):
        if tag[place] in "0123456789abcdef":
            return f"{tag[:place]}{'1' if tag[place] == '0' else '0'}{tag[place + 1 :]}"
    return f"{tag}0"


class _LooksWhereItMust(Subdirectory):
    """A storage that looks for itself whether a condition is true, if it turns out that it cannot put on conditions."""

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner, "")

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """See `StorageBackend`."""
        try:
            return super().put(key, data, condition=condition)
        except AtomicityError:
            if condition is None:
                raise
            return _put_and_look(self, key, data, condition)


class _Looks(Subdirectory):
    """A storage that looks for itself whether a condition is true: the one it stands for ignores them."""

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner, "")

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """See `StorageBackend`."""
        return super().put(key, data) if condition is None else _put_and_look(self, key, data, condition)

    def open_new(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `CreatesObjects`."""
        return LooksBefore(self, key, self.open_writer(key, size))


def _put_and_look(store: StorageBackend, key: str, data: bytes, condition: PutCondition) -> str:
    """Put on a condition that is looked at before, and look after whether it is what stands there.

    Two that do this at once may both find that all is well: no look and put are one step.
    """
    found = _find(store, key)
    met = found is None if isinstance(condition, IfAbsent) else found is not None and found[1] == condition.tag
    if not met:
        raise ConditionFailedError(
            f"cannot put {key!r}: it is not what was expected there when it was looked at before"
        )
    store.put(key, data)
    found = _find(store, key)
    if found is None or found[0] != data:
        raise ConditionFailedError(
            f"{key!r} was put, and another one took its place at once: something else writes there"
        )
    return found[1]


def _find(store: StorageBackend, key: str) -> tuple[bytes, str] | None:
    try:
        return store.get_with_tag(key)
    except ObjectNotFoundError:
        return None
