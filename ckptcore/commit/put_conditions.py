"""Conditions of puts: a test if a storage obeys them, and an emulation for storages that do not."""

from __future__ import annotations

import urllib.parse
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from ckptcore.commit.root import ROOT_KEY, new_save_id
from ckptcore.commit.subdirectory import Subdirectory
from ckptcore.errors import (
    AtomicityError,
    ConditionFailedError,
    ObjectNotFoundError,
    SaveLostError,
    StorageError,
    StoragePermissionError,
)
from ckptcore.protocols import IF_ABSENT, IfAbsent, IfTag, ObjectWriter, PutCondition, StorageBackend
from ckptcore.protocols.storage import CheckedWriter

if TYPE_CHECKING:
    from ckptcore.commit.location import Location
    from ckptcore.commit.method import StorageSupport


def try_conditional_puts(location: Location, root: bytes, tag: str) -> str:
    """Try conditional puts on the storage of a location, once for each service and Context. Return the tag of the root.

    Makes two puts whose conditions are not met. The first put writes the current root, on the condition that no root
    exists. The second put writes a missing object, on the condition that it has a certain tag. A storage that supports
    conditional puts refuses both. A storage that accepts the second put may check the tags of existing objects only.
    Then the current root is also put, on the condition that it has a wrong tag.

    Args:
        location: the location.
        root: the bytes of the current root.
        tag: its tag.

    Raises:
        AtomicityError: the storage refuses or ignores conditions, and the Context does not allow that.
        SaveLostError: another process deleted the root meanwhile, so a put created it again; it is removed.
    """
    support, service = location.support, _service(location.absolute)
    supported = support.conditional_puts
    if service not in supported:
        missing = f"checkpoint.{new_save_id()}.{ROOT_KEY}"
        try:
            supported[service] = _is_supported(location, root, IF_ABSENT)
            if supported[service] and not _is_refused(location.store, missing, b"", IfTag(tag)):
                with suppress(StorageError):  # the credentials may not allow deletions
                    location.store.delete([missing])
                supported[service] = _is_supported(location, root, IfTag(_other_tag(tag)))
                support.creates_missing[service] = supported[service]
        except AtomicityError as error:
            raise refuse_storage(location, f"its storage has no conditional puts: {error}") from error
        if not supported[service] and support.without == "marker":
            tag = location.store.get_with_tag(ROOT_KEY)[1]  # one of the puts replaced the root
        if support.creates_missing.get(service):
            support.say_once(location.parent, _CREATES_MISSING)
    if not supported[service] and support.without == "refuse":
        raise refuse_storage(
            location, "its storage ignores the conditions of puts: a put 'if absent' replaced an object"
        )
    return tag


_CREATES_MISSING: Final = (
    "this storage accepts If-Match for an object that does not exist, so a put alone cannot detect that another "
    "process deleted the checkpoint. Each commit lists its objects afterwards, and fails if they are gone"
)


def creates_missing(location: Location) -> bool:
    """Return True if the storage of a location accepts If-Match for an object that does not exist."""
    return location.support.creates_missing.get(_service(location.absolute), False)


def refuse_storage(location: Location, reason: str) -> AtomicityError:
    """Return the error for a location without conditional puts."""
    return AtomicityError(
        f"cannot save to {location.display}: {reason}. Without them, two saves at once, or one that was suspended, "
        "could destroy a checkpoint. Use a storage with conditional puts (an S3 service that supports If-None-Match "
        "and If-Match). If only one process at a time saves to a location, you can pass "
        "Context(io=IOOptions(without_conditions='marker')) instead. Nothing was saved"
    )


def _service(url: str) -> str:
    """Return the scheme and host (bucket) of a URL, or the text itself if it is not a URL."""
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}" if parts.scheme else url


def _is_supported(location: Location, root: bytes, condition: PutCondition) -> bool:
    """Return True if the storage refuses to put the current root on a condition that is not met.

    Raises:
        SaveLostError: another process deleted the root meanwhile.
    """
    if _is_refused(location.store, ROOT_KEY, root, condition):
        return True
    if not _is_refused(location.store, ROOT_KEY, root, condition):
        return False
    # The second put was refused, so conditions work, and the root was deleted before the first put. Deletions remove
    # the root last, so nothing else exists.
    location.store.delete([ROOT_KEY])
    raise SaveLostError(
        f"{location.display} was deleted by another process at the same time. Check the location and save again. "
        "Nothing was changed"
    )


def _is_refused(store: StorageBackend, key: str, data: bytes, condition: PutCondition) -> bool:
    try:
        store.put(key, data, condition=condition)
    except (ConditionFailedError, ObjectNotFoundError):
        return True
    except StoragePermissionError:
        if isinstance(condition, IfTag):
            return True  # without the permission to list objects, services deny access to an object that is missing
        raise
    return False


def _other_tag(tag: str) -> str:
    """Return another tag of the same form: services refuse malformed tags without reading the object."""
    for index in range(len(tag) - 1, -1, -1):
        if tag[index] in "0123456789abcdef":
            return f"{tag[:index]}{'1' if tag[index] == '0' else '0'}{tag[index + 1 :]}"
    return f"{tag}0"


class EmulatedConditionalPuts(Subdirectory):
    """A storage that emulates conditional puts if its service refuses or ignores them. See `IOOptions`."""

    def __init__(self, inner: StorageBackend, url: str, support: StorageSupport) -> None:
        """Emulate conditional puts of a storage; `url` is its address."""
        super().__init__(inner, "")
        self._service = _service(url)
        self._support = support

    @property
    def _are_ignored(self) -> bool:
        return self._support.conditional_puts.get(self._service) is False

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """See `StorageBackend`."""
        if condition is None or not self._are_ignored:
            try:
                return super().put(key, data, condition=condition)
            except AtomicityError:
                if condition is None:
                    raise
        return self._emulate(key, data, condition)

    def open_new(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`."""
        if self._are_ignored:
            return CheckedWriter(self, key, self.open_writer(key, size))
        return super().open_new(key, size)

    def _emulate(self, key: str, data: bytes, condition: PutCondition) -> str:
        """Check the condition, put the object, and check that the storage has this object.

        This is not atomic: two concurrent calls may both succeed.
        """
        current = find_object(self, key)
        met = (
            current is None if isinstance(condition, IfAbsent) else current is not None and current[1] == condition.tag
        )
        if not met:
            raise ConditionFailedError(f"cannot put {key!r}: it changed since it was read")
        super().put(key, data)
        current = find_object(self, key)
        if current is None or current[0] != data:
            raise ConditionFailedError(f"{key!r} was replaced by another process right after it was put")
        return current[1]


def find_object(store: StorageBackend, key: str) -> tuple[bytes, str] | None:
    """Return the bytes and the tag of an object; None if it does not exist."""
    try:
        return store.get_with_tag(key)
    except ObjectNotFoundError:
        return None
