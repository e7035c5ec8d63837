"""Conditional puts: a test whether a storage supports them, and their emulation if the Context allows it."""

from __future__ import annotations

import urllib.parse
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ckptcore.commit.root import ROOT_KEY
from ckptcore.commit.subdirectory import Subdirectory
from ckptcore.context import WithoutConditions
from ckptcore.errors import AtomicityError, ConditionFailedError, ObjectNotFoundError, SaveLostError
from ckptcore.protocols import IF_ABSENT, IfAbsent, IfTag, ObjectWriter, PutCondition, StorageBackend
from ckptcore.protocols.storage import CheckedWriter

if TYPE_CHECKING:
    from ckptcore.commit.location import Location

__all__ = ["Conditions", "EmulatedConditionalPuts", "refuse_conditions"]


class Conditions:
    """Knows which storages support conditional puts; each is tried once. A Context has one. Any thread."""

    def __init__(self, without: WithoutConditions = "refuse") -> None:
        """Have tried no storage; `without` says what to do with a storage that does not support conditional puts."""
        self._without: Final = without
        self._supported: dict[str, bool] = {}

    def open(self, location: Location) -> Location:
        """Return a location for a save: with emulated conditional puts if the Context asks for markers."""
        return replace(location, parent=self.storage(location.parent, location.absolute))

    def storage(self, storage: StorageBackend, url: str) -> StorageBackend:
        """Return a storage for conditional puts.

        Args:
            storage: one without real directories.
            url: the URL of the directory, or of an object in the same bucket.
        """
        if self._without == "refuse":
            return storage
        if self._supported.get(_service(url)) is False:
            return EmulatedConditionalPuts(storage)
        return _EmulatedIfRefused(storage)

    def try_out(self, location: Location, root: bytes, tag: str) -> tuple[Location, str]:
        """Try the conditional puts of a location, unless the result is known.

        Returns the location to use from now on, and the tag of the root. Sends two small requests that must fail: they
        put the present root again, on conditions that are not met.

        Args:
            location: as `open` gave it.
            root: the bytes of the present root.
            tag: its tag.

        Raises:
            AtomicityError: it ignores conditions, and the Context does not allow that.
            SaveLostError: the root was deleted meanwhile, so the put succeeded; the root is removed again.
        """
        if isinstance(location.parent, EmulatedConditionalPuts):
            return location, tag
        service = _service(location.absolute)
        supported = self._supported.get(service)
        if supported is None:
            try:
                conditions = (IF_ABSENT, IfTag(_other_tag(tag)))
                supported = all(_is_supported(location, root, condition) for condition in conditions)
            except AtomicityError as error:
                raise refuse_conditions(location, f"its storage cannot put on conditions: {error}") from error
            if service:
                self._supported[service] = supported
        if supported:
            return location, tag
        if self._without == "refuse":
            raise refuse_conditions(
                location, "its storage ignores the conditions of puts: one 'if absent' replaced an object"
            )
        location = replace(location, parent=EmulatedConditionalPuts(location.parent))
        return location, location.store.get_with_tag(ROOT_KEY)[1]


def refuse_conditions(location: Location, found: str) -> AtomicityError:
    """Return the error for a location without conditional puts."""
    return AtomicityError(
        f"cannot save to {location.display}: {found}, so that two saves at once, or one that stood still, could "
        "destroy a checkpoint. Use a storage that keeps conditions (of an S3 service, one that knows If-None-Match "
        "and If-Match); or, where only one process ever saves to a location at a time, pass "
        "Context(io=IOOptions(without_conditions='marker')). Nothing was saved"
    )


def _service(url: str) -> str:
    """Return the scheme and host (bucket) of a URL; empty if it has none."""
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}" if parts.scheme else ""


def _is_supported(location: Location, root: bytes, condition: PutCondition) -> bool:
    if _is_refused(location.store, root, condition):
        return True
    if not _is_refused(location.store, root, condition):
        return False
    # The second put was refused, so conditions work, and the root was deleted before the first one. Deletions remove
    # the root last, so nothing else exists.
    location.store.delete([ROOT_KEY])
    raise SaveLostError(
        f"what stood at {location.display} was deleted at the same time; look at what is there and call again. Nothing "
        "was changed"
    )


def _is_refused(store: StorageBackend, root: bytes, condition: PutCondition) -> bool:
    try:
        store.put(ROOT_KEY, root, condition=condition)
    except (ConditionFailedError, ObjectNotFoundError):
        return True
    return False


def _other_tag(tag: str) -> str:
    """Return another tag of the same form: services refuse malformed tags without looking at the object."""
    for place in range(len(tag) - 1, -1, -1):
        if tag[place] in "0123456789abcdef":
            return f"{tag[:place]}{'1' if tag[place] == '0' else '0'}{tag[place + 1 :]}"
    return f"{tag}0"


class _EmulatedIfRefused(Subdirectory):
    """A storage that emulates a conditional put after its storage refused one."""

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner, "")

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """See `StorageBackend`."""
        try:
            return super().put(key, data, condition=condition)
        except AtomicityError:
            if condition is None:
                raise
            return _emulate_put(self, key, data, condition)


class EmulatedConditionalPuts(Subdirectory):
    """A storage that emulates every conditional put, because its storage ignores conditions."""

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner, "")

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """See `StorageBackend`."""
        return super().put(key, data) if condition is None else _emulate_put(self, key, data, condition)

    def open_new(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`."""
        return CheckedWriter(self, key, self.open_writer(key, size))


def _emulate_put(store: StorageBackend, key: str, data: bytes, condition: PutCondition) -> str:
    """Check the condition, put, and check that the object is the one that was put.

    This is not atomic: two concurrent calls may both succeed.
    """
    found = _find(store, key)
    met = found is None if isinstance(condition, IfAbsent) else found is not None and found[1] == condition.tag
    if not met:
        raise ConditionFailedError(f"cannot put {key!r}: it changed since it was read")
    store.put(key, data)
    found = _find(store, key)
    if found is None or found[0] != data:
        raise ConditionFailedError(f"{key!r} was put and replaced at once: another process writes there")
    return found[1]


def _find(store: StorageBackend, key: str) -> tuple[bytes, str] | None:
    try:
        return store.get_with_tag(key)
    except ObjectNotFoundError:
        return None
