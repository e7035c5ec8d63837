"""A reader that was written only from ``docs/format``. It shows that this description is sufficient.

It needs only NumPy, ml_dtypes and xxhash, never imports ckptcore, and verifies every checksum that it reads.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import xxhash

_HEAD = re.compile(
    rb'\{"format":"ckptcore","version":\d+,"state":"(claimed|partial|committed)",'
    rb'"role":"(checkpoint|member|export)","save_id":"[0-9a-f]{16}",'
)
_TAIL = re.compile(rb',"checksum":"xxh3_64:([0-9a-f]{16})"\}\n')
_TAIL_BYTES = 40
_HIDDEN = re.compile(r"\..+\.[0-9a-f]{16}\.ckptcore", re.DOTALL)


class NotCommitted(Exception):
    """The error for a location at which a save began but did not commit."""


@dataclass(frozen=True)
class Leaf:
    """A stored leaf.

    Attributes:
        kind: the kind of the leaf, ``array`` by default.
        content: an array, or the value of another leaf.
    """

    kind: str
    content: Any


def read_checkpoint(directory: Path) -> tuple[Any, dict[str, Any]]:
    """Return the tree in a directory, with a `Leaf` for each leaf, and the custom metadata.

    Attribute keys are returned as strings ``.name``, and containers of other kinds as dicts.
    """
    root, tables = _root_and_tables(directory)
    if root["role"] == "member":
        _expect_committed(directory, root)
    return _tree(directory, root, tables), tables["custom"]


def read_composite(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of each checkpointable in a directory, by name, and the custom metadata.

    The content of a checkpointable is a tree like that of `read_checkpoint`, or the bytes of files by key. For states
    of single processes, it is a list with the content of each process. Deleted checkpointables are omitted.
    """
    root, tables = _root_and_tables(directory)
    contents_by_name: dict[str, Any] = {}
    for name, (kind, processes) in root["members"].items():
        if kind not in ("tree", "files"):
            raise ValueError(f"the kind {kind!r}")
        if "/" in name or _object(directory, name) == directory:
            raise ValueError(f"the name {name!r}")
        own = [f"{name}.rank_{rank}" for rank in range(processes)] if (processes or 1) > 1 else [name]
        there = [directory / member for member in own if (directory / member).is_dir()]
        contents = [_member(path, kind, root["save_id"]) for path in there]
        if contents:
            contents_by_name[name] = contents[0] if processes is None else contents
    return contents_by_name, tables["custom"]


def _member(directory: Path, kind: str, save_id: str) -> Any:
    root, tables = _root_and_tables(directory)
    if root["role"] != "member" or root["save_id"] != save_id:
        raise ValueError(f"{directory} was replaced")
    if root.get("kind", "tree") != kind:
        raise ValueError(f"{directory} is a {root.get('kind', 'tree')!r} and is said to be a {kind!r}")
    if kind == "files":
        return _verified_objects(directory, tables["objects"])
    return _tree(directory, root, tables)


def _expect_committed(directory: Path, root: dict[str, Any]) -> None:
    above = directory.parent / "checkpoint.json"
    if _HIDDEN.fullmatch(directory.parent.name):
        raise NotCommitted(f"{directory.parent} is the directory of a save under way")
    if not above.exists():
        return  # the member was copied to a location outside its composite
    around = _unsealed(above.read_bytes())
    if around["state"] != "committed" or "members" not in around or around["save_id"] != root["save_id"]:
        raise NotCommitted(f"{directory} belongs to another save than {above}")


def _root_and_tables(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    root = _unsealed((directory / "checkpoint.json").read_bytes())
    if root["format"] != "ckptcore" or root["version"] != 1:
        raise ValueError(f"format {root['format']!r}, version {root['version']!r}")
    if root["state"] != "committed":
        raise NotCommitted(root["state"])
    tables = dict(root["tables"])
    for name, part in root["parts"].items():
        data = _object(directory, part["key"]).read_bytes()
        if len(data) != part["size"] or f"xxh3_64:{xxhash.xxh3_64_hexdigest(data)}" != part["checksum"]:
            raise ValueError(f"the part {part['key']} is damaged")
        tables[name] = json.loads(data)
    return root, tables


def _tree(directory: Path, root: dict[str, Any], tables: dict[str, Any]) -> Any:
    objects = _verified_objects(directory, tables["objects"])
    if root["layout"] != "safetensors":
        raise ValueError(f"layout {root['layout']!r}")
    leaves = iter(_leaves(tables["tree"], tables["layout"], objects, _referred(directory, root, tables)))
    tree = _grown(tables["tree"]["skeleton"], leaves)
    if next(leaves, None) is not None:
        raise ValueError("more leaves than the skeleton has")
    return tree


def _referred(directory: Path, root: dict[str, Any], tables: dict[str, Any]) -> dict[int, Leaf]:
    """Return the leaves that bases store, by number."""
    if "references" not in tables:
        return {}
    stored = []
    for path, save_id in root["bases"]:
        if path.startswith("/") or {"", "."} & set(path.split("/")):
            raise ValueError(f"the base {path!r}")
        base, inside = _root_and_tables(directory.parent / path)
        if base["save_id"] != save_id:
            raise ValueError(f"the base {path!r} was replaced")
        objects = _verified_objects(directory.parent / path, inside["objects"])
        there = _has_itself(inside)
        leaves = _leaves(
            inside["tree"], inside["layout"], objects, dict.fromkeys(range(inside["tree"]["count"])), there
        )
        stored.append({leaf: leaves[leaf] for leaf in there})
    table = tables["references"]
    rows = zip(table["leaf"], table["base"], table["stored"], strict=True)
    return {leaf: stored[base][there] for leaf, base, there in rows}


def _has_itself(tables: dict[str, Any]) -> list[int]:
    """Return the leaves that the checkpoint stores itself, in ascending order. Its layout numbers only these."""
    aliases = dict(tables["tree"]["aliases"])
    referred = set(tables.get("references", {"leaf": []})["leaf"])
    return [leaf for leaf in range(tables["tree"]["count"]) if aliases.get(leaf, leaf) not in referred]


def _unsealed(data: bytes) -> dict[str, Any]:
    tail = _TAIL.fullmatch(data[-_TAIL_BYTES:])
    if tail is None:
        raise ValueError("the root does not end in its checksum")
    body = data[:-_TAIL_BYTES]
    if xxhash.xxh3_64_hexdigest(body).encode() != tail[1]:
        raise ValueError("the root is damaged")
    if _HEAD.match(data[:128]) is None:
        raise ValueError("the root does not begin with its head")
    document: dict[str, Any] = json.loads(body + b"}")
    return document


def _object(directory: Path, key: str) -> Path:
    if {"", ".", ".."} & set(key.split("/")):
        raise ValueError(f"the key {key!r}")
    return directory / key


def _verified_objects(directory: Path, table: dict[str, Any]) -> dict[str, bytes]:
    if table["algorithm"] != "xxh3_64":
        raise ValueError(f"checksums {table['algorithm']!r}")
    largest = table["block_bytes"]
    objects = {}
    for key, size, encoded in zip(table["key"], table["size"], table["checksums"], strict=True):
        data = _object(directory, key).read_bytes()
        if len(data) != size:
            raise ValueError(f"{key} has {len(data)} bytes, not {size}")
        stated = np.frombuffer(base64.b64decode(encoded), "<u8").tolist()
        fitting = [largest >> shift for shift in range(5) if -(-size // (largest >> shift)) == len(stated)]
        if stated and not fitting:
            raise ValueError(f"{key} has {len(stated)} checksums")
        block_bytes = fitting[0] if stated else largest
        blocks = [data[start : start + block_bytes] for start in range(0, size, block_bytes)]
        if stated and stated != [xxhash.xxh3_64_intdigest(block) for block in blocks]:
            raise ValueError(f"{key} is damaged")
        objects[key] = data
    return objects


def _leaves(
    tree: dict[str, Any],
    layout: dict[str, Any],
    objects: dict[str, bytes],
    referred: dict[int, Any],
    own: list[int] | None = None,
) -> list[Any]:
    """Return all leaves, including those of `referred`. `own` are the leaves of the layout, by default the others."""
    tied = dict(tree["aliases"])
    if own is None:
        own = [leaf for leaf in range(tree["count"]) if tied.get(leaf, leaf) not in referred]
    else:
        referred = {leaf: None for leaf in referred if leaf not in own}
    places = {
        own[number]: (layout["files"][file], offset)
        for number, file, offset in zip(layout["leaf"], layout["file"], layout["offset"], strict=True)
    }
    aliases = dict(tree["aliases"])
    values = {leaf: Leaf(kind, _value(kind, value)) for leaf, kind, value in tree["values"]}
    arrays = zip(tree["dtype"], tree["shape"], strict=True)
    leaves: list[Any] = []
    for number in range(tree["count"]):
        if number in values:
            leaves.append(values[number])
            continue
        dtype_number, shape = next(arrays)
        if aliases.get(number, number) in referred:
            leaves.append(referred[aliases.get(number, number)])
            continue
        dtype = _dtype(tree["dtypes"][dtype_number])
        key, offset = places[aliases.get(number, number)]
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(objects[key], dtype, count, offset) if count else np.empty(0, dtype)
        kind = tree["extras"].get(str(number), {}).get("kind", "array")
        content: Any = array.reshape(shape)
        if kind == "str":
            content = content.tobytes().decode("utf-8", "surrogatepass")
        elif kind == "bytes":
            content = content.tobytes()
        leaves.append(Leaf(kind, content))
    return leaves


def _dtype(name: str) -> np.dtype[Any]:
    extension = getattr(ml_dtypes, name, None)
    return np.dtype(extension if extension is not None else name).newbyteorder("<")


def _value(kind: str, value: Any) -> Any:
    match kind:
        case "list" | "tuple" | "dict":
            return _column(kind, value)
        case "int" if isinstance(value, str):
            return int(value, 16)
        case "float":
            return float(value)
        case "complex":
            return complex(float(value[0]), float(value[1]))
        case "bytes":
            return base64.b64decode(value)
        case "str":
            return _text(value)
        case _:
            return value


def _text(encoded: Any) -> str:
    if isinstance(encoded, str):
        return encoded
    return base64.b64decode(encoded["utf8"]).decode("utf-8", "surrogatepass")


def _key(encoded: Any) -> Any:
    if isinstance(encoded, dict) and "attr" in encoded:
        return f".{_text(encoded['attr'])}"
    return encoded if isinstance(encoded, int) else _text(encoded)


def _grown(skeleton: Any, leaves: Iterator[Leaf]) -> Any:
    if skeleton == 0:
        return next(leaves)
    kind, keys, children = skeleton[:3]
    if isinstance(children, int):
        children = [0] * children
    grown = [_grown(child, leaves) for child in children]
    if kind == "list":
        return grown
    if kind == "tuple":
        return tuple(grown)
    names = [_key(key) for key in keys]
    pairs = zip(names, grown, strict=True)
    return OrderedDict(pairs) if kind == "OrderedDict" else dict(pairs)


def _column(kind: str, value: Any) -> Any:
    """Return a container of plain values that is stored as columns."""
    items = _column_values(value["items"])
    if kind == "dict":
        return dict(zip(_column_values(value["keys"]), items, strict=True))
    values = list(_children(value.get("runs", [len(items)]), iter(items)))
    return tuple(values) if kind == "tuple" else values


def _children(runs: list[Any], items: Iterator[Any]) -> Iterator[Any]:
    for run in runs:
        if isinstance(run, int):
            yield from islice(items, run)
            continue
        kind, inner, times = run
        for _ in range(times):
            yield (tuple if kind == "tuple" else list)(_children(inner, items))


def _column_values(columns: dict[str, Any]) -> list[Any]:
    of_type: dict[int, list[Any]] = {}
    if "bool" in columns:
        of_type[1] = [byte != 0 for byte in base64.b64decode(columns["bool"])]
    if "int" in columns:
        width, data = columns["int"][0], base64.b64decode(columns["int"][1])
        of_type[2] = [int.from_bytes(data[at : at + width], "little", signed=True) for at in range(0, len(data), width)]
    if "long" in columns:
        of_type[2] = [int(number, 16) for number in columns["long"]]
    if "float" in columns:
        of_type[3] = [number for (number,) in struct.iter_unpack("<d", base64.b64decode(columns["float"]))]
    if "str" in columns:
        of_type[4] = list(map(_text, columns["str"]))
    if "types" not in columns:
        (values,) = of_type.values()
        return values
    iterators = {kind: iter(values) for kind, values in of_type.items()}
    return [None if kind == 0 else next(iterators[kind]) for kind in base64.b64decode(columns["types"])]
