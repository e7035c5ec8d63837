"""Templates of items: the bytes that items from one writer share, to parse similar items quickly.

The first item of a kind is read by the general zip reader and becomes a template. A later item
matches if it has the same length and the same bytes everywhere except in the variable parts: the
content of one member, whose CRC-32 is verified; the content of `_UNREAD`, which no reader uses; and
the checksums of both. All other bytes, including headers and the directory, equal bytes that the
general reader accepted. An item that does not match is read by the general reader, which also
reports errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from isal import isal_zlib

from ckptcore_dcp.zip_directories import DIRECTORY_ENTRY, STORED, ZipBytes, find_directory
from ckptcore_dcp.zips import ZipMember

Kind = TypeVar("Kind")
Read = TypeVar("Read")

_UNREAD: Final = ".data/serialization_id"
"""A member that differs in every item: a hash of the saved data (``torch/serialization.py``)."""
_ENTRY_CRC: Final = 16
"""Offset of the CRC-32 in a directory entry, in bytes."""
_MAX_BYTES: Final = 1 << 16
"""Maximum size of a template."""
_MAX_TEMPLATES: Final = 256
"""Maximum number of templates per load."""
_MAX_PER_LENGTH: Final = 8
"""Maximum number of templates per kind and length. Padding gives items with different pickles equal lengths."""


@dataclass(frozen=True, slots=True)
class ItemTemplate:
    """An item that was read, for comparison with items that differ in one member.

    Attributes:
        nbytes: length of the item.
        same: bytes that must not differ, as (start, stop, bytes).
        start, stop: byte range of the content of the variable member, in the item.
        crc: offset in the item of the CRC-32 that the member's directory entry states.
    """

    nbytes: int
    same: Sequence[tuple[int, int, bytes]]
    start: int
    stop: int
    crc: int

    def content(self, item: memoryview) -> memoryview | None:
        """Return the verified content of the variable member, or None if the item does not match."""
        if len(item) != self.nbytes:
            return None
        for start, stop, data in self.same:
            if item[start:stop] != data:
                return None
        content = item[self.start : self.stop]
        if isal_zlib.crc32(content) != int.from_bytes(item[self.crc : self.crc + 4], "little"):
            return None
        return content


class TemplateCache(Generic[Kind, Read]):
    """Templates of one load, by kind and length of the item. Not thread-safe.

    Stores the parsed result of the first item with each template.
    """

    def __init__(self) -> None:
        """Create an empty cache."""
        self._known: dict[tuple[Kind, int], list[tuple[ItemTemplate, Read]]] = {}
        self._remaining = _MAX_TEMPLATES

    def match(self, kind: Kind, item: memoryview) -> tuple[memoryview, Read] | None:
        """Return the content of an item that matches a template, and the template's result; None without a match."""
        for template, read in self._known.get((kind, len(item)), ()):
            content = template.content(item)
            if content is not None:
                return content, read
        return None

    def add(
        self, kind: Kind, item: memoryview, start: int, members: Mapping[str, ZipMember], differs: str, read: Read
    ) -> None:
        """Add an item that was read by the general reader as a template.

        Args:
            kind: further properties that matching items share.
            item: all bytes of the item.
            start: its offset; offsets in `members` count from the same origin.
            members: its members by torch's names.
            differs: name of the variable member.
            read: the parsed result.
        """
        if len(item) > _MAX_BYTES or not self._remaining:
            return
        known = self._known.setdefault((kind, len(item)), [])
        if len(known) >= _MAX_PER_LENGTH:
            return
        template = _build_template(bytes(item), start, members, differs)
        if template is not None:
            known.append((template, read))
            self._remaining -= 1


def _build_template(item: bytes, start: int, members: Mapping[str, ZipMember], differs: str) -> ItemTemplate | None:
    """Build a template of an item. Return None if the item is unsuitable, such as a compressed member."""
    found = members[differs]
    if not found.crc or found.compression != STORED:
        return None
    entries = _entry_offsets(item)
    gaps: list[tuple[int, int]] = []
    for member in (found, members.get(_UNREAD)):
        if member is None:
            continue
        first = member.start - start
        if member.name not in entries:
            return None  # torch does not write such names
        crc = entries[member.name] + _ENTRY_CRC
        gaps += [(first, first + member.nbytes), (crc, crc + 4)]
        if member.descriptor:  # signature, then the checksum again, which no reader needs
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


def _entry_offsets(item: bytes) -> Mapping[str, int]:
    """Return the offset of the directory entry of each member. The directory was validated before."""
    position, stop, _ = find_directory(ZipBytes(lambda start, stop: item[start:stop], 0, len(item), "item"))
    found: dict[str, int] = {}
    while position < stop:
        fields = DIRECTORY_ENTRY.unpack_from(item, position)
        name = position + DIRECTORY_ENTRY.size
        found[item[name : name + fields[10]].decode("utf-8", "replace")] = position
        position = name + sum(fields[10:13])
    return found
