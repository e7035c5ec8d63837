"""The structure of a saved value: keys, paths and skeletons."""

from __future__ import annotations

import binascii
import math
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from ckptcore.errors import CorruptCheckpointError, NameCollisionError

JSON: TypeAlias = None | bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"]
"""The content of a JSON document."""

MAX_DEPTH: Final = 200
"""Maximum depth of nested containers in a tree that is saved or loaded."""

MAX_KEY_DEPTH: Final = 16
"""Maximum depth of nested tuples in a key."""

MAX_KEY_PARTS: Final = 10_000
"""Maximum number of parts of a tuple in a key. The sampler NUTS has a key with the names of all parameters."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """The key of a field of an object, in contrast to a str key of a mapping."""

    name: str

    def __lt__(self, other: Attribute) -> bool:
        return self.name < other.name if isinstance(other, Attribute) else NotImplemented

    def __str__(self) -> str:
        return self.name


PlainKey: TypeAlias = int | str | tuple["PlainKey", ...]
"""A key of a mapping: an int, a bool, a str, or a tuple of such keys. As in Python, True and 1 are equal."""

Key: TypeAlias = PlainKey | Attribute
"""A step from a container to one of its children: an index or a key of a mapping, or an attribute."""

TreePath: TypeAlias = tuple[Key, ...]
"""The steps from the root of a tree to a leaf; empty if the tree is a leaf."""

NodeKind: TypeAlias = Literal["dict", "OrderedDict", "list", "tuple", "object"]
"""The container that a load without an abstract tree builds; an `object` becomes a dict or a list."""

_KINDS: Final = ("dict", "OrderedDict", "list", "tuple", "object")


_NOT_FINITE: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

_NAN_BITS: Final = "nan:"
"""Prefix of the 64 bits of a NaN in hexadecimal, its sign first."""


class _Leaf:
    __slots__ = ()

    def __repr__(self) -> str:
        return "LEAF"

    def __reduce__(self) -> str:
        return "LEAF"


LEAF: Final = _Leaf()
"""Placeholder for a leaf in a skeleton."""


class Node(NamedTuple):
    """A container in a skeleton.

    Attributes:
        kind: the container that a load without an abstract tree builds.
        keys: the key of each child, in order.
        children: a `Node` or `LEAF` for each key.
        type: the qualified name of the saved type if `kind` does not determine it, else None. It is only shown, and
            never imported.
        attributes: the attributes of an OrderedDict instance, as JSON; None if there are none. PyTorch stores the
            versions of modules in such an attribute.
    """

    kind: NodeKind
    keys: tuple[Key, ...]
    children: tuple[Skeleton, ...]
    type: str | None = None
    attributes: Mapping[str, JSON] | None = None


class StoredObject(dict[Any, Any]):
    """The stored state of an object that is not a container of Python: a dict of its attributes and keys.

    Attributes:
        type: the qualified name of its saved type, if known. It comes from the checkpoint, and is never imported.
    """

    def __init__(self, items: Iterable[tuple[Any, Any]], kind: str | None) -> None:
        """Build a dict of the items."""
        super().__init__(items)
        self.type = kind


Skeleton: TypeAlias = Node | _Leaf
"""A tree with `LEAF` in place of its leaves. Leaves are numbered in its order, depth first."""


def format_path(path: TreePath) -> str:
    """Format a path for people: ``params/dense['a.b'][0].mu``; ``<root>`` for the empty path."""
    if not path:
        return "<root>"
    parts: list[str] = []
    for key in path:
        if isinstance(key, Attribute):
            parts.append(f".{key.name}" if parts else key.name)
        elif isinstance(key, str) and key.isidentifier():
            parts.append(f"/{key}" if parts else key)
        else:
            parts.append(f"[{key!r}]")
    return "".join(parts)


def are_indices(keys: Sequence[Key]) -> bool:
    """Return True if keys are the ints 0, 1, 2 and so on. The bools False and True are keys of a mapping instead."""
    return tuple(keys) == tuple(range(len(keys))) and bool not in map(type, keys)


def is_name(key: object) -> bool:
    """Return True for a key of a mapping that is a name. Ints, such as epoch numbers, change while a program runs."""
    return isinstance(key, str | bool | tuple)


def leaf_paths(skeleton: Skeleton) -> Iterator[TreePath]:
    """Yield the path of each leaf, in the order of the leaves."""
    if not isinstance(skeleton, Node):
        yield ()
        return
    stack: list[tuple[TreePath, Iterator[tuple[Key, Skeleton]]]] = [
        ((), zip(skeleton.keys, skeleton.children, strict=True))
    ]
    while stack:
        prefix, children = stack[-1]
        for key, child in children:
            if isinstance(child, Node):
                stack.append(((*prefix, key), zip(child.keys, child.children, strict=True)))
                break
            yield (*prefix, key)
        else:
            stack.pop()


def empty_nodes(skeleton: Skeleton, path: TreePath = ()) -> Iterator[tuple[TreePath, Node]]:
    """Yield the containers without children, and their paths, depth first."""
    if isinstance(skeleton, Node):
        if not skeleton.children:
            yield path, skeleton
        for key, child in zip(skeleton.keys, skeleton.children, strict=True):
            if child is not LEAF:
                yield from empty_nodes(child, (*path, key))


def leaf_count(skeleton: Skeleton) -> int:
    """Return the number of leaves of a skeleton."""
    if not isinstance(skeleton, Node):
        return 1
    leaves = skeleton.children.count(LEAF)
    if leaves == len(skeleton.children):
        return leaves
    return leaves + sum([leaf_count(child) for child in skeleton.children if child is not LEAF])


def leaf_names(paths: Mapping[int, TreePath], *, reserved: Collection[str] = (), root: str = "array") -> dict[int, str]:
    """Return a name for each leaf of a flat layout: its keys joined by dots, as other software expects.

    Leaves with equal or reserved names get escaped names. In an escaped name, a backslash precedes each dot and each
    backslash within a key. A str key that is empty or looks like an int is quoted. An attribute begins with ``\\@``, a
    bool or a tuple with a backslash. If the escaped name is reserved too, another backslash precedes it.

    Args:
        paths: by leaf, its path.
        reserved: names that the layout uses itself.
        root: name of the leaf if the tree is a single leaf.

    Raises:
        NameCollisionError: two leaves have the same escaped name.
    """
    names = {leaf: ".".join(map(str, path)) if path else root for leaf, path in paths.items()}
    if not "".join(names.values()).isascii():
        names = {leaf: _printable(name) for leaf, name in names.items()}
    counts = Counter(names.values())
    if len(counts) == len(names) and not any(name in counts for name in reserved):
        return names
    for leaf, name in list(names.items()):
        if counts[name] > 1 or name in reserved:
            names[leaf] = _printable(".".join(map(_escape, paths[leaf]))) or "\\" + root
            if names[leaf] in reserved:
                names[leaf] = "\\" + names[leaf]
    seen: dict[str, int] = {}
    for leaf, name in names.items():
        if name in seen:
            raise NameCollisionError(
                f"{format_path(paths[seen[name]])} and {format_path(paths[leaf])} would both be stored as {name!r}; "
                "rename one of the keys. Nothing was written"
            )
        seen[name] = leaf
    return names


def _printable(name: str) -> str:
    """Return a name with escaped surrogates, such as ``\\ud800``, because file formats cannot store surrogates."""
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode("utf-8")


def _escape(key: Key) -> str:
    if isinstance(key, int) and not isinstance(key, bool):
        return str(key)
    escaped = str(key).replace("\\", "\\\\").replace(".", "\\.")
    if isinstance(key, bool | tuple):
        return "\\" + escaped
    if isinstance(key, Attribute):
        return "\\@" + escaped
    escaped = escaped.replace("'", "\\'")
    return f"'{escaped}'" if escaped.lstrip("-").isdigit() or not escaped else escaped


def text_to_json(text: str) -> JSON:
    """Encode text so that JSON preserves it: ``{"utf8": base64}`` if it has surrogates, which JSON joins or refuses."""
    if text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    return {"utf8": binascii.b2a_base64(text.encode("utf-8", "surrogatepass"), newline=False).decode("ascii")}


def text_from_json(encoded: JSON) -> str:
    """Decode the result of `text_to_json`.

    Raises:
        CorruptCheckpointError: it is not text.
    """
    if isinstance(encoded, str):
        return encoded
    try:
        if isinstance(encoded, dict) and len(encoded) == 1:
            return binascii.a2b_base64(encoded["utf8"], strict_mode=True).decode("utf-8", "surrogatepass")
    except (KeyError, TypeError, ValueError) as error:
        raise _bad_skeleton(encoded) from error
    raise _bad_skeleton(encoded)


def float_to_json(number: float) -> JSON:
    """Return a finite number itself, others as text. A NaN other than `math.nan` keeps its sign and payload."""
    if math.isfinite(number):
        return number
    if not math.isnan(number):
        return "inf" if number > 0 else "-inf"
    bits = struct.pack(">d", number)
    return "nan" if bits == struct.pack(">d", math.nan) else f"{_NAN_BITS}{bits.hex()}"


def float_from_json(value: JSON) -> float:
    """Decode the result of `float_to_json`.

    Raises:
        ValueError: `value` is something else.
        OverflowError: it is an int beyond the range of floats.
    """
    if isinstance(value, float | int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and (number := _NOT_FINITE.get(value)) is not None:
        return number
    if isinstance(value, str) and value.startswith(_NAN_BITS) and len(value) == len(_NAN_BITS) + 16:
        (number,) = struct.unpack(">d", bytes.fromhex(value[len(_NAN_BITS) :]))
        if math.isnan(number):
            return float(number)
    raise ValueError(value)


def skeleton_to_json(skeleton: Skeleton) -> JSON:
    """Return a skeleton as JSON: 0 for a leaf, else ``[kind, keys, children]``, and the type and attributes if known.

    `keys` is None for a list or tuple. An attribute key is ``{"attr": name}``. Int, bool and str keys are encoded as
    themselves (for text with surrogates see `text_to_json`), and a tuple as a list of its parts. If every child is a
    leaf, `children` is the number of children.
    """
    if not isinstance(skeleton, Node):
        return 0
    # Most keys are text that JSON stores as it is: look at all of them together.
    plain = {*map(type, skeleton.keys)} == {str} and "".join(map(str, skeleton.keys)).isascii()
    keys = list(map(str, skeleton.keys)) if plain else [_key_to_json(key) for key in skeleton.keys]
    flat = skeleton.children.count(LEAF) == len(keys)
    children: JSON = len(keys) if flat else [skeleton_to_json(child) for child in skeleton.children]
    sequence = skeleton.kind in ("list", "tuple")
    encoded: list[JSON] = [skeleton.kind, None if sequence else keys, children]
    if skeleton.type is not None or skeleton.attributes:
        encoded.append(None if skeleton.type is None else skeleton.type.encode("utf-8", "replace").decode("utf-8"))
    if skeleton.attributes:
        encoded.append(dict(skeleton.attributes))
    return encoded


def skeleton_from_json(encoded: JSON, limit: int) -> Skeleton:
    """Decode the result of `skeleton_to_json`; the JSON may be hostile.

    Args:
        limit: the number of leaves of the checkpoint; the skeleton may not have more.

    Raises:
        CorruptCheckpointError: it is not a skeleton.
    """
    return _decode(encoded, [limit], 0)


def _decode(encoded: JSON, left: list[int], depth: int) -> Skeleton:
    """Decode a node. `left` has the number of leaves that may follow: a short text must not create many leaves."""
    if encoded == 0 and isinstance(encoded, int):
        _take_leaves(1, left)
        return LEAF
    if depth > MAX_DEPTH:
        raise damaged_tree(f"it is deeper than {MAX_DEPTH} containers")
    if not isinstance(encoded, list) or not 3 <= len(encoded) <= 5:
        raise _bad_skeleton(encoded)
    kind, keys_json, children_json, *rest = encoded
    if kind not in _KINDS:
        raise _bad_skeleton(kind)
    note = rest[0] if rest else None
    if note is not None and not isinstance(note, str):
        raise _bad_skeleton(note)
    attributes = rest[1] if len(rest) > 1 else None
    if attributes is not None and not isinstance(attributes, dict):
        raise _bad_skeleton(attributes)
    children: tuple[Skeleton, ...]
    if isinstance(children_json, int) and not isinstance(children_json, bool):
        count = len(keys_json) if isinstance(keys_json, list) else children_json
        if count != children_json or count < 0:
            raise _bad_skeleton(children_json)
        _take_leaves(count, left)
        children = (LEAF,) * count
    elif isinstance(children_json, list):
        children = tuple([_decode(child, left, depth + 1) for child in children_json])
    else:
        raise _bad_skeleton(children_json)
    keys: tuple[Key, ...]
    if kind in ("list", "tuple"):
        if keys_json is not None:
            raise _bad_skeleton(keys_json)
        keys = tuple(range(len(children)))
    else:
        if not isinstance(keys_json, list) or len(keys_json) != len(children):
            raise _bad_skeleton(keys_json)
        keys = tuple(keys_json if {*map(type, keys_json)} == {str} else map(_key_from_json, keys_json))
        if len(set(keys)) != len(keys):
            raise _bad_skeleton("a container with a duplicate key")
    return Node(kind, keys, children, note, attributes)


def _take_leaves(count: int, left: list[int]) -> None:
    left[0] -= count
    if left[0] < 0:
        raise damaged_tree("it has more leaves than its leaf table")


def _key_to_json(key: Key) -> JSON:
    if isinstance(key, Attribute):
        return {"attr": text_to_json(key.name)}
    if isinstance(key, tuple):
        return [_key_to_json(part) for part in key]
    return key if isinstance(key, int) else text_to_json(key)


def _key_from_json(encoded: JSON) -> Key:
    if isinstance(encoded, dict) and "attr" in encoded and len(encoded) == 1:
        return Attribute(text_from_json(encoded["attr"]))
    return _plain_key_from_json(encoded, 0)


def _plain_key_from_json(encoded: JSON, depth: int) -> PlainKey:
    if isinstance(encoded, int):
        return encoded
    if not isinstance(encoded, list):
        return text_from_json(encoded)
    if depth == MAX_KEY_DEPTH or len(encoded) > MAX_KEY_PARTS:
        raise _bad_skeleton("a key with too many parts")
    return tuple([_plain_key_from_json(part, depth + 1) for part in encoded])


def _bad_skeleton(encoded: object) -> CorruptCheckpointError:
    return damaged_tree(f"expected a container or a leaf, found {str(encoded)[:120]!r}")


def damaged_tree(reason: str) -> CorruptCheckpointError:
    """Return the error for metadata that do not describe a tree."""
    return CorruptCheckpointError(f"the saved tree cannot be read: {reason}")
