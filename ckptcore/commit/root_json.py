"""The JSON format of roots (``checkpoint.json``) and of their parts. A root ends in a checksum of itself.

Every decoder accepts hostile bytes. It raises only `CorruptCheckpointError`, `UnsupportedVersionError`, and
the errors of a `ReadPart` function.
"""

from __future__ import annotations

import binascii
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

import xxhash

from ckptcore.commit.root import (
    MAX_ORDER,
    NO_LEAVES,
    ROOT_KEY,
    AnyRoot,
    Base,
    Claim,
    CompositeRoot,
    Member,
    PartialSave,
    References,
    Role,
    Root,
    RootSummary,
    SaveOrder,
    Session,
    check_name,
)
from ckptcore.errors import (
    CheckpointError,
    CorruptCheckpointError,
    InvalidLocationError,
    UnsupportedVersionError,
    converts_errors,
)
from ckptcore.installed import version_of
from ckptcore.model.metadata import (
    BLOCK_BYTES,
    CHECKSUM_ALGORITHM,
    ObjectRecord,
    TreeMetadata,
    check_key,
)
from ckptcore.model.transfer import list_of_column
from ckptcore.model.tree import JSON

FORMAT_VERSION: Final = 1
"""The format version that is written, and the newest that can be read."""

HEAD_BYTES: Final = 128
"""Maximum size of the head of a root in bytes."""

_FORMAT: Final = "ckptcore"
_HEAD: Final = re.compile(
    rb'\{"format":"ckptcore","version":[1-9][0-9]{0,8},"state":"(claimed|partial|committed)",'
    rb'"role":"(checkpoint|member|export)","save_id":"([0-9a-f]{16})"[,}]'
)
_SAVE_ID: Final = re.compile(r"[0-9a-f]{16}")
_REPAIR: Final = "restore it from a copy, or load another checkpoint"
_INLINE_BYTES: Final = 1 << 18
"""A table up to this size is stored in the root. A larger table is a part: a separate object."""

_MAX_PART_BYTES: Final = 1 << 32
_CHECKSUM_NAME: Final = "xxh3_64"
"""The algorithm of the checksum of a root and of its parts."""
_CHECKSUM: Final = re.compile(rf',"checksum":"{_CHECKSUM_NAME}:([0-9a-f]{{16}})"\}}\n'.encode())
CHECKSUM_TAIL_BYTES: Final = len(f',"checksum":"{_CHECKSUM_NAME}:0123456789abcdef"}}\n')
"""Bytes of the checksum at the end of a root. It covers the bytes before it."""
_MAX_PROCESSES: Final = 1 << 24

_NOT_FINITE: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

ReadPart: TypeAlias = Callable[[str, int], bytes]
"""A function that takes a key and a size, and returns at most that many bytes of the object."""


class RootHead(NamedTuple):
    """The fields that follow ``format`` and ``version`` in every root, in this order, in every version of the format.

    Attributes:
        state: ``committed`` for a checkpoint; ``claimed`` or ``partial`` for a save that is not committed.
        role: see `Role`.
        save_id: the save id.
    """

    state: Literal["claimed", "partial", "committed"]
    role: Role
    save_id: str


def read_head(data: bytes) -> RootHead | None:
    """Return the head of a root; None if the bytes are not a root. The checksum is not verified.

    Args:
        data: the root, or its first `HEAD_BYTES`.
    """
    head = _HEAD.match(data)
    if head is None:
        return None
    state, role = cast(Any, head[1].decode("ascii")), cast(Any, head[2].decode("ascii"))
    return RootHead(state, role, head[3].decode("ascii"))  # the pattern matches no other values


def is_claim(data: bytes) -> bool:
    """Return True for the root of a claim, with a correct checksum."""
    return _has_state(data, "claimed")


def is_partial(data: bytes) -> bool:
    """Return True for the session table of a partial save, with a correct checksum."""
    return _has_state(data, "partial")


def _has_state(data: bytes, state: str) -> bool:
    head = read_head(data)
    if head is None or head.state != state:
        return False
    try:
        _verified_body(data)
    except CorruptCheckpointError:
        return False
    return True


# --- encoding ---------------------------------------------------------------------------------------------------------


def encode_claim(claim: Claim | PartialSave) -> bytes:
    """Return the bytes of the root of a claim, or of a session table, which is the claim of a partial save."""
    if isinstance(claim, Claim):
        return _encode_root({**_head("claimed", claim.save_id), "created": claim.created})
    return _encode_root({**_head("partial", claim.save_id), "created": claim.created, "layout": claim.layout,
                  "agreed": claim.agreed, "ranks": claim.ranks, "owner": claim.owner, "token": claim.token,
                  "sessions": list(claim.sessions)})  # fmt: skip


def encode_root(root: Root | CompositeRoot) -> tuple[bytes, Mapping[str, bytes]]:
    """Return the bytes of a committed root, and of its parts by key. The parts must be written before the root."""
    own: dict[str, JSON] = {}
    tables: dict[str, JSON] = {}
    role: Role = "checkpoint"
    if isinstance(root, CompositeRoot):
        own["members"] = {name: [member.kind, member.processes] for name, member in root.members.items()}
        own["files"] = sorted(root.files) or None
        own["default"] = root.default
    else:
        role = root.role
        own["layout" if root.layout else "kind"] = root.layout or "files"
        tables = {"tree": root.tree.to_json(), "layout": root.state} if root.layout else {"files": root.state}
        own["index"] = root.index or None
        tables["objects"] = _encode_objects(root.objects)
    tables["custom"] = root.custom
    if isinstance(root, Root) and (references := root.references).bases:
        own["bases"] = [[base.path, base.save_id] for base in references.bases]
        if references.leaf:
            tables["references"] = {"leaf": references.leaf, "base": references.base, "stored": references.stored}
    inline: dict[str, JSON] = {}
    described: dict[str, JSON] = {}
    parts: dict[str, bytes] = {}
    for name, table in tables.items():
        encoded = _dump(table)
        if len(encoded) <= _INLINE_BYTES:
            inline[name] = table
            continue
        key = f"checkpoint.{root.save_id}.{name}.json"
        parts[key] = encoded
        described[name] = {"key": key, "size": len(encoded), "checksum": _checksum(encoded)}
    # JSON cannot store NaN and infinity as numbers.
    metrics = {name: value if math.isfinite(value) else str(value) for name, value in root.metrics.items()}
    fields: dict[str, JSON] = {
        **_head("committed", root.save_id, role),
        "created": root.created,
        "writer": dict(root.writer),
        "order": list(root.order) if root.order != SaveOrder() else None,
        **own,
        "tables": inline,
        "parts": described,
        "metrics": metrics or None,
        "progress": dict(root.progress) or None,
        "timeline": root.timeline,
    }
    return _encode_root({name: value for name, value in fields.items() if value is not None}), parts


def _encode_objects(objects: Mapping[str, ObjectRecord]) -> JSON:
    records = [objects[key] for key in sorted(objects)]  # sorted, so that equal saves have equal bytes
    return {
        "algorithm": CHECKSUM_ALGORITHM,
        "block_bytes": BLOCK_BYTES,
        "key": [record.key for record in records],
        "size": [record.size for record in records],
        "checksums": [binascii.b2a_base64(record.checksums, newline=False).decode("ascii") for record in records],
    }


def _head(state: str, save_id: str, role: Role = "checkpoint") -> dict[str, JSON]:
    return {"format": _FORMAT, "version": FORMAT_VERSION, "state": state, "role": role, "save_id": save_id}


def _encode_root(document: Mapping[str, JSON]) -> bytes:
    """Return JSON whose last field is a checksum of all bytes before that field."""
    body = _dump(document)[:-1]
    return body + f',"checksum":"{_checksum(body)}"}}\n'.encode("ascii")


def _dump(document: JSON) -> bytes:
    # JSON escapes can express any text in ASCII. NaN is not valid JSON. The state of a layout may have integer columns
    # in place of lists, which `default` converts.
    return json.dumps(document, separators=(",", ":"), allow_nan=False, default=list_of_column).encode("ascii")


def _checksum(data: bytes) -> str:
    return f"{_CHECKSUM_NAME}:{xxhash.xxh3_64_hexdigest(data)}"


# --- decoding ---------------------------------------------------------------------------------------------------------


def decode_root(data: bytes, read_part: ReadPart) -> AnyRoot:
    """Decode a root and its parts.

    Raises:
        CorruptCheckpointError: they are damaged.
        UnsupportedVersionError: a newer version of ckptcore wrote them.
    """
    with _errors_as_damage():
        document, head = _open(data)
        if head.state == "claimed":
            return Claim(head.save_id, _text(document["created"]))
        if head.state == "partial":
            return _decode_partial(document, head.save_id)
        kind = _kind(document.get("kind", "tree"), "the checkpoint")
        tables: dict[str, Any] = dict(document["tables"])
        parts = []
        for name, described in document["parts"].items():
            key = check_key(_text(described["key"]))
            tables[name] = _read_part(key, described["size"], _text(described["checksum"]), read_part)
            parts.append(key)
        common: dict[str, Any] = {
            "save_id": head.save_id,
            "writer": _decode_writer(document),
            "custom": dict(tables["custom"]),
            "parts": tuple(parts),
            **_decode_notes(document),
        }
        if "members" in document:
            members = _decode_members(document["members"])
            default = document.get("default")
            default = default if isinstance(default, str) and default in members else None
            return CompositeRoot(members=members, files=_decode_files(document), default=default, **common)
        layout = "" if kind == "files" else _text(document["layout"])
        if not layout and kind == "tree":
            raise _damaged("its layout has no name")
        tree = TreeMetadata.from_json(tables["tree"]) if layout else NO_LEAVES
        return Root(
            layout=layout,
            state=tables["layout" if layout else "files"],
            tree=tree,
            objects=_decode_objects(tables["objects"]),
            role=head.role,
            references=_decode_references(document, tables, tree),
            index=_decode_index(document),
            **common,
        )


def summarize_root(data: bytes) -> RootSummary:
    """Decode the small fields of a root and the sizes of its objects, without other tables and parts.

    Raises:
        CorruptCheckpointError, UnsupportedVersionError: as for `decode_root`.
    """
    with _errors_as_damage():
        document, head = _open(data)
        parts = document.get("parts", {})
        tables = document.get("tables", {})
        objects: dict[str, int] | None = None
        if "objects" not in parts:
            table = tables.get("objects", {"key": [], "size": []})
            objects = dict(_sizes(zip(table["key"], table["size"], strict=True)))
        return RootSummary(
            committed=head.state == "committed",
            save_id=head.save_id,
            members=_decode_members(document["members"]) if "members" in document else None,
            objects=objects,
            parts=dict(_sizes((described["key"], described["size"]) for described in parts.values())),
            bases=_decode_bases(document),
            is_update="references" in {**tables, **parts},
            index_key=_decode_index(document),
            files=_decode_files(document),
            **_decode_notes(document),
        )


def _sizes(rows: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str, int]]:
    for key, size in rows:
        yield check_key(_text(key)), _count(size)


def with_order(data: bytes, order: SaveOrder) -> bytes:
    """Return the bytes of a committed root in which only the order is changed.

    Raises:
        CorruptCheckpointError, UnsupportedVersionError: as for `decode_root`.
    """
    with _errors_as_damage():
        document, _ = _open(data)
        document["order"] = list(order)
        if order == SaveOrder():
            del document["order"]
        return _encode_root(document)


def bases_of_root(data: bytes) -> tuple[Base, ...]:
    """Decode the bases of a root. Every version of the format stores them in the same form.

    Raises:
        CorruptCheckpointError
    """
    if b'"bases"' not in data:
        return ()  # fast path: a deletion reads the roots of all checkpoints in the directory
    with _errors_as_damage():
        return _decode_bases(_decode_root(data))


@converts_errors
def _errors_as_damage() -> Iterator[None]:
    """Raise `CorruptCheckpointError` for every error that malformed JSON can cause."""
    try:
        yield
    except InvalidLocationError as error:
        raise _damaged(f"invalid object name: {error}") from error
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _damaged(repr(error)) from error


def _damaged(reason: str, key: str = ROOT_KEY) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{ROOT_KEY} is corrupt: {reason}", key=key)


def _open(data: bytes) -> tuple[dict[str, Any], RootHead]:
    """Return the fields and the head of a root. Verifies its checksum and its version."""
    document = _decode_root(data)
    if document.get("format") != _FORMAT:
        raise _damaged("it was not written by ckptcore")
    version = document["version"]
    if type(version) is not int or version < 1:
        raise _damaged(f"invalid format version {version!r}")
    if version > FORMAT_VERSION:
        writer = _decode_writer(document).get("ckptcore", "")[:40]
        by = f" (written by ckptcore {writer})" if writer.isprintable() and writer else ""
        raise UnsupportedVersionError(
            f"the checkpoint has format version {version}{by}, and ckptcore {version_of('ckptcore')} reads up to "
            f"{FORMAT_VERSION}; upgrade ckptcore to load it"
        )
    head = read_head(data)
    if head is None:
        raise _damaged("it does not begin with format, version, state, role and save_id")
    return document, head


def _decode_root(data: bytes) -> dict[str, Any]:
    document = _parse(_verified_body(data) + b"}", ROOT_KEY)
    if not isinstance(document, dict):
        raise _damaged("it is not a JSON object")
    return document


def _verified_body(data: bytes) -> bytes:
    """Return the bytes before the checksum, after verifying it."""
    tail = _CHECKSUM.fullmatch(data[-CHECKSUM_TAIL_BYTES:])
    if tail is None:
        raise CorruptCheckpointError(
            f"{ROOT_KEY} is truncated or damaged: it has {len(data)} bytes and does not end with a checksum; {_REPAIR}",
            key=ROOT_KEY, start=0, stop=len(data),
        )  # fmt: skip
    body = data[:-CHECKSUM_TAIL_BYTES]
    expected = f"{_CHECKSUM_NAME}:{tail[1].decode('ascii')}"
    _verify(ROOT_KEY, body, expected, len(data))
    return body


def _verify(key: str, data: bytes, expected: str, nbytes: int) -> None:
    """Check the bytes of an object with a recorded checksum. The object has `nbytes` bytes."""
    if (actual := _checksum(data)) != expected:
        raise CorruptCheckpointError(
            f"{key} is damaged: the recorded checksum is {expected}, but the bytes have {actual}; {_REPAIR}",
            key=key, start=0, stop=nbytes,
        )  # fmt: skip


def _parse(data: bytes, key: str) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise CorruptCheckpointError(f"{key} is corrupt: invalid JSON: {error}", key=key) from error


def _read_part(key: str, size: Any, checksum: str, read_part: ReadPart) -> JSON:
    if type(size) is not int or not 0 <= size <= _MAX_PART_BYTES:
        raise _damaged(f"invalid size {size!r} of {key}", key)
    data = read_part(key, size + 1)  # one byte more, to notice an object that is too long
    if len(data) != size:
        actual = f"{len(data)} bytes" if len(data) < size else "more bytes"
        raise CorruptCheckpointError(
            f"{key} has {actual}, expected {size} bytes; restore it from a copy, or delete the checkpoint",
            key=key, start=min(len(data), size), stop=max(len(data), size),
        )  # fmt: skip
    _verify(key, data, checksum, size)
    table: JSON = _parse(data, key)
    return table


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _damaged(f"expected text, found {str(value)[:80]!r}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise _damaged(f"expected a whole number of at least 0, found {str(value)[:80]!r}")
    return value


_SESSION: Final = (_count, _count, _text, _count, _count, _text, _count, _text)
"""Checks of the columns of a session table: the fields of `Session`."""


def _decode_partial(document: dict[str, Any], save_id: str) -> PartialSave:
    ranks, owner = _count(document["ranks"]), document["owner"]
    sessions: list[Session] = []
    stop = 0
    for row in document["sessions"]:
        columns: Any = [check(value) for check, value in zip(_SESSION, row, strict=True)]
        session = Session(*columns)
        possible = 1 <= session.size <= _MAX_PROCESSES and stop <= session.first <= ranks - session.size
        if not possible or session.key_bytes > _MAX_PART_BYTES:
            raise _damaged(f"invalid session {session}")
        if session.key != f"checkpoint.{save_id}.session-{session.first}":
            raise _damaged(f"invalid key {session.key[:80]!r} of the session {session.first}")
        sessions.append(session)
        stop = session.first + session.size
    if owner is not None and _count(owner) >= ranks:
        raise _damaged(f"invalid owner {owner} of {ranks} ranks")
    return PartialSave(
        save_id, _text(document["created"]), _text(document["layout"]), _text(document["agreed"]), ranks, owner,
        _text(document["token"]), tuple(sessions),
    )  # fmt: skip


def _decode_notes(document: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a root that no load needs. Invalid values are left out or replaced by defaults."""
    metrics = {}
    for name, value in _table(document, "metrics").items():
        if type(value) in (int, float) and abs(value) <= sys.float_info.max:
            metrics[name] = float(value)
        elif isinstance(value, str) and value in _NOT_FINITE:
            metrics[name] = _NOT_FINITE[value]
    created, order = document.get("created"), document.get("order")
    if not isinstance(order, list) or len(order) != len(SaveOrder._fields):
        order = SaveOrder()
    is_possible = all(type(part) is int and 0 <= part <= MAX_ORDER for part in order)
    return {
        "created": created if isinstance(created, str) else "",
        "order": SaveOrder(*order) if is_possible else SaveOrder(),
        "metrics": metrics,
        "timeline": document.get("timeline"),
        "progress": {name: value for name, value in _table(document, "progress").items() if type(value) is int},
    }


def _decode_writer(document: dict[str, Any]) -> dict[str, str]:
    return {name: value for name, value in _table(document, "writer").items() if isinstance(value, str)}


def _decode_index(document: dict[str, Any]) -> str:
    return check_key(_text(document["index"])) if "index" in document else ""


def _table(document: dict[str, Any], name: str) -> dict[str, Any]:
    table = document.get(name)
    return table if isinstance(table, dict) else {}


def _decode_members(members: Any) -> dict[str, Member]:
    decoded = {}
    for name, (kind, processes) in members.items():
        if processes is not None and (type(processes) is not int or not 1 <= processes <= _MAX_PROCESSES):
            raise _damaged(f"invalid number of processes {str(processes)[:80]!r} of {name!r}")
        decoded[check_name(name)] = Member(_kind(kind, f"{name!r} in the checkpoint"), processes)
    return decoded


def _kind(value: Any, what: str) -> Literal["tree", "files"]:
    if value in ("tree", "files"):
        return cast(Literal["tree", "files"], value)
    raise UnsupportedVersionError(
        f"{what} has the kind {str(value)[:80]!r}, which this version of ckptcore does not support; upgrade ckptcore"
    )


def _decode_files(document: dict[str, Any]) -> tuple[str, ...]:
    """Return the files next to the checkpointables of a composite; none if they are invalid. No load needs them."""
    files = document.get("files")
    try:
        return tuple([check_key(_text(key)) for key in files]) if isinstance(files, list) else ()
    except (CorruptCheckpointError, InvalidLocationError):
        return ()


def _decode_bases(document: dict[str, Any]) -> tuple[Base, ...]:
    bases = document.get("bases", [])
    decoded = tuple([Base(_text(path), _text(save_id)) for path, save_id in bases])
    if not all(not base.save_id or _SAVE_ID.fullmatch(base.save_id) for base in decoded) or len(set(decoded)) != len(
        decoded
    ):
        raise _damaged(f"invalid bases {str(bases)[:200]}")
    return decoded


def _decode_references(document: dict[str, Any], tables: dict[str, Any], tree: TreeMetadata) -> References:
    table: Any = tables.get("references")
    if table is None:
        return References(_decode_bases(document)) if "bases" in document else References()
    columns = [tuple(map(_count, table[name])) for name in ("leaf", "base", "stored")]
    references = References(_decode_bases(document), *columns)
    references.check(tree)
    return references


def _decode_objects(table: Any) -> dict[str, ObjectRecord]:
    if table["algorithm"] != CHECKSUM_ALGORITHM or table["block_bytes"] != BLOCK_BYTES:
        raise UnsupportedVersionError(
            f"the checkpoint has checksums {table['algorithm']!r} per {table['block_bytes']!r} bytes; "
            "upgrade ckptcore to load it"
        )
    objects = {}
    columns = (table["key"], table["size"], table["checksums"])
    if {*map(type, columns)} != {list} or len({*map(len, columns)}) != 1:
        raise _damaged("invalid table of objects")
    for key, size, encoded in zip(*columns, strict=True):
        record = ObjectRecord(check_key(_text(key)), size, binascii.a2b_base64(encoded, strict_mode=True))
        if type(size) is not int or size < 0 or not record.block_bytes:
            raise _damaged(f"invalid size {size!r} of {key}, with {len(record.checksums)} bytes of checksums", key)
        objects[key] = record
    return objects
