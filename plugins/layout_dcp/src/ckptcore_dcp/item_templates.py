"""Templates of items: what the items of one writer have in common, so that a thousand of them are read like one.

The first item of a kind is read as any zip is. It then is the template of those that follow: an item of the same length
that has the same bytes wherever nothing may differ is laid out like it. What may differ is the content of one member,
which is looked at and whose CRC-32 is compared, and that of `_UNREAD`, which no reader of items reads; and the
checksums of both. All else, every header, the directory and each other member, has been compared with what the general
reader has accepted. An item that differs in anything is none of the template's, and is read as any zip is, which also
says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from isal import isal_zlib

from ckptcore_dcp.zip_directories import Window, find_directory
from ckptcore_dcp.zip_records import DIRECTORY_ENTRY, STORED
from ckptcore_dcp.zips import ZipMember

__all__ = ["ItemTemplate", "KnownTemplates"]

Kind = TypeVar("Kind")
Read = TypeVar("Read")

_UNREAD: Final = ".data/serialization_id"
"""A member that differs from item to item: a hash of what was saved (``torch/serialization.py``)."""
_ENTRY_CRC: Final = 16
"""Where the checksum is in an entry of the directory, in bytes."""
_MOST_BYTES: Final = 1 << 16
"""Longer items are no templates..."""
_MOST_TEMPLATES: Final = 256
"""... and a load keeps so many..."""
_MOST_OF_A_LENGTH: Final = 8
"""... of which so many are of items of one kind and length: padding makes the items of several pickles as long as each other."""


@dataclass(frozen=True, slots=True)
class ItemTemplate:
    """An item that was read, of which others differ in one member only.

    Attributes:
        nbytes: how long it is.
        same: where bytes are that may not differ, and which.
        start, stop: where the member is that may.
        crc: where the checksum of that stands in the directory.
    """

    nbytes: int
    same: Sequence[tuple[int, int, bytes]]
    start: int
    stop: int
    crc: int

    def content(self, item: memoryview) -> memoryview | None:
        """The bytes of the member that may differ, compared with their checksum; None where the item is not like the template."""
        if len(item) != self.nbytes:
            return None
        for start, stop, data in self.same:
            if item[start:stop] != data:
                return None
        content = item[self.start : self.stop]
        if isal_zlib.crc32(content) != int.from_bytes(item[self.crc : self.crc + 4], "little"):
            return None
        return content


class KnownTemplates(Generic[Kind, Read]):
    """The templates of a load, by what items are of and how long they are. One thread.

    What was made of the first of a kind is kept with its template.
    """

    def __init__(self) -> None:
        """Know none."""
        self._known: dict[tuple[Kind, int], list[tuple[ItemTemplate, Read]]] = {}
        self._left = _MOST_TEMPLATES

    def match(self, kind: Kind, item: memoryview) -> tuple[memoryview, Read] | None:
        """The content of an item that is like one that was read, and what was made of that one; None if there is no such."""
        for template, read in self._known.get((kind, len(item)), ()):
            content = template.content(item)
            if content is not None:
                return content, read
        return None

    def learn(
        self, kind: Kind, item: memoryview, start: int, members: Mapping[str, ZipMember], differs: str, read: Read
    ) -> None:
        """Take an item that was read as a template.

        Args:
            kind: what else items have in common.
            item: all of its bytes.
            start: where it begins in what the places of its members count from.
            members: of it, by the names that torch knows them by.
            differs: the member that may differ.
            read: what was made of it.
        """
        if len(item) > _MOST_BYTES or not self._left:
            return
        known = self._known.setdefault((kind, len(item)), [])
        if len(known) >= _MOST_OF_A_LENGTH:
            return
        template = _template(bytes(item), start, members, differs)
        if template is not None:
            known.append((template, read))
            self._left -= 1


def _template(item: bytes, start: int, members: Mapping[str, ZipMember], differs: str) -> ItemTemplate | None:
    """The template that an item is, which the general reader has read; None where a checksum is missing or bytes are compressed."""
    found = members[differs]
    if not found.crc or found.compression != STORED:
        return None
    entries = _entries(item)
    gaps: list[tuple[int, int]] = []
    for member in (found, members.get(_UNREAD)):
        if member is None:
            continue
        first = member.start - start
        if member.name not in entries:
            return None  # it has a name that torch would not give
        crc = entries[member.name] + _ENTRY_CRC
        gaps += [(first, first + member.nbytes), (crc, crc + 4)]
        if member.descriptor:  # its signature, then the checksum once more, which no reader needs
            gaps.append((first + member.nbytes + 4, first + member.nbytes + 8))
    gaps.sort()
    same: list[tuple[int, int, bytes]] = []
    done = 0
    for first, stop in [*gaps, (len(item), len(item))]:
        if first < done:
            return None
        same.append((done, first, item[done:first]))
        done = stop
    same.sort(key=lambda part: part[1] - part[0])
    first = found.start - start
    return ItemTemplate(len(item), same, first, first + found.nbytes, entries[found.name] + _ENTRY_CRC)


def _entries(item: bytes) -> Mapping[str, int]:
    """Where the entry of each member begins in an item whose directory was read before."""
    place, stop, _ = find_directory(Window(lambda start, stop: item[start:stop], 0, len(item), "item"))
    found: dict[str, int] = {}
    while place < stop:
        fields = DIRECTORY_ENTRY.unpack_from(item, place)
        name = place + DIRECTORY_ENTRY.size
        found[item[name : name + fields[10]].decode("utf-8", "replace")] = place
        place = name + sum(fields[10:13])
    return found
