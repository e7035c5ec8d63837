"""Storages of PyTorch in plain pickles: ``pickle.dump`` writes each as the bytes of a torch.save file.

Source: ``TypedStorage.__reduce__`` of ``torch/storage.py``. The bytes have the format before torch 1.6,
see `legacy_files`, and contain one storage.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ckptcore.errors import CorruptCheckpointError
from ckptcore_dcp.legacy_files import is_legacy, read_legacy
from ckptcore_dcp.pickles import Call, Global, OutOfLine, Persistent, Places, Value, builtin_value
from ckptcore_dcp.stored_tensors import PickledBytes
from ckptcore_dcp.zip_directories import Fetch

_LOAD: Final = Global("torch.storage", "_load_from_bytes")
_ENCODE: Final = Global("_codecs", "encode")
_FIRST_BYTES: Final = 1 << 11
_MAX_TEXT_BYTES: Final = 1 << 28


class EmbeddedStorage(NamedTuple):
    """A storage in the bytes of a call.

    Attributes:
        reference: the reference that a pickle of torch.save would have.
        place: place of its elements in the pickle.
    """

    reference: Persistent
    place: PickledBytes


class EmbeddedStorages:
    """The storages of one pickle. Each is read once."""

    def __init__(self, key: str, places: Places | None) -> None:
        """Create an empty collection. Reads nothing yet.

        Args:
            key: the object that contains the pickle, for errors.
            places: byte ranges of texts and bytes in the pickle; None if they have no byte range in the object.
        """
        self._key = key
        self._places = places
        self._found: dict[int, tuple[Call, EmbeddedStorage | None]] = {}

    def find(self, value: Value) -> EmbeddedStorage | None:
        """Return the storage that a call reads, or None.

        Raises:
            CorruptCheckpointError: its bytes are damaged.
        """
        if not isinstance(value, Call) or value.function != _LOAD or len(value.arguments) != 1:
            return None
        if id(value) not in self._found:
            self._found[id(value)] = value, self._read(value.arguments[0])
        return self._found[id(value)][1]

    def _read(self, data: Value) -> EmbeddedStorage | None:
        is_text = False
        if isinstance(data, Call) and data.function == _ENCODE and data.arguments:  # protocol 2
            is_text, data = True, data.arguments[0]
            if isinstance(data, OutOfLine) and data.stop - data.start <= _MAX_TEXT_BYTES:
                start, data = data.start, data.read()
                return self._of_text(start, data, escaped=False) if isinstance(data, str) else None
        if isinstance(data, OutOfLine):
            whole, start = data, data.start

            def fetch(first: int, stop: int) -> bytes:
                return whole.fetch(start + first, min(start + stop, whole.stop))

            return None if is_text else self._of_bytes(fetch, whole.stop - start, start)
        place = self._places.find(data) if self._places is not None and isinstance(data, str | bytes) else None
        if place is None:
            return None
        if isinstance(data, str):
            return self._of_text(place.start, data, place.escaped) if is_text else None
        assert isinstance(data, bytes)  # it has a place
        content = data
        return self._of_bytes(lambda first, stop: content[first:stop], len(content), place.start)

    def _of_text(self, start: int, text: str, escaped: bool) -> EmbeddedStorage | None:
        """Return the storage in a text that has a character for each byte.

        The text begins at byte `start` of the pickle.
        """
        content = builtin_value(Call(_ENCODE, (text, "latin1")))
        if escaped or not isinstance(content, bytes):  # escapes differ between writers, so offsets are unknown
            return None
        storage = self._of_bytes(lambda first, stop: content[first:stop], len(content), 0)
        if storage is None:
            return None
        place = storage.place
        before, own = text[: place.start], text[place.start : place.start + place.size]
        first = start + len(before.encode())
        return storage._replace(place=PickledBytes(first, len(own.encode()), place.size, "text"))

    def _of_bytes(self, fetch: Fetch, size: int, start: int) -> EmbeddedStorage | None:
        if not is_legacy(fetch(0, 64)):
            return None
        value, storages, _ = read_legacy(fetch, size, key=self._key, places=Places(), first_bytes=_FIRST_BYTES)
        if not isinstance(value, Persistent) or len(storages) != 1:
            raise CorruptCheckpointError(
                f"{self._key!r} has a storage of PyTorch that is damaged; restore it from a copy", key=self._key
            )
        ((_, storage),) = storages.items()
        return EmbeddedStorage(value, PickledBytes(start + storage.start, storage.nbytes, storage.nbytes))
