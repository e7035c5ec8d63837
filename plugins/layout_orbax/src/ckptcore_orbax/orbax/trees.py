"""Trees described by metadata files: containers, Python values, and properties of leaves that were not read yet."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import (
    JSON,
    LEAF,
    ArraySpec,
    Attribute,
    HostArray,
    Key,
    LeafRecord,
    Node,
    Skeleton,
    ValueRecord,
    column_array,
    column_value,
    float_from_json,
    float_to_json,
)

NONE: Final = ValueRecord("none", None)
"""The record of None."""

_EXACT: Final = 1 << 53
"""Ints of a smaller magnitude are JSON numbers in records. Others are hexadecimal text, as in the core."""


def value_record(value: object) -> ValueRecord | None:
    """Return the record of a None, bool, int, float, complex, str or bytes; None for other types."""
    match value:
        case None:
            return NONE
        case bool():
            return ValueRecord("bool", value)
        case int():
            return ValueRecord("int", value if abs(value) < _EXACT else hex(value))
        case float():
            return ValueRecord("float", float_to_json(value))
        case complex():
            return ValueRecord("complex", [float_to_json(value.real), float_to_json(value.imag)])
        case str():
            if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
                data = value.encode("utf-8", "surrogatepass")
                return ValueRecord("str", {"utf8": base64.b64encode(data).decode("ascii")})
            return ValueRecord("str", value)
        case bytes():
            return ValueRecord("bytes", base64.b64encode(value).decode("ascii"))
    return None


def scalar_record(array: HostArray, name: str) -> ValueRecord:
    """Return the record of a Python scalar that Orbax stored as an array without axes.

    Args:
        array: the array; of ints, floats, bools or complex numbers.
        name: name of the array, for errors.

    Raises:
        CorruptCheckpointError: the array has axes, or a dtype that Python scalars do not have.
    """
    record = value_record(array.item()) if array.ndim == 0 and array.dtype.kind in "biufcV" else None
    if record is None:
        raise CorruptCheckpointError(
            f"the scalar {name!r} is stored as {array.dtype}{list(array.shape)}; expected one number without axes",
            key=name,
        )
    return record


def value_type(record: LeafRecord) -> str:
    """Return Orbax's name for the type of a leaf: ``None``, ``scalar``, ``string``, ``jax.Array`` or ``np.ndarray``.

    A NumPy scalar is an array, so that it keeps its dtype. An array is a ``jax.Array`` if its
    notes contain a sharding, or if it is the data of random keys.
    """
    if isinstance(record, ValueRecord):
        if record.kind == "none":
            return "None"
        if (array := value_array(record)) is None:
            return "string"
        return "scalar" if record.kind in ("bool", "int", "float") and array.ndim == 0 else "np.ndarray"
    return "jax.Array" if "sharding" in record.notes or record.kind == "jax.key" else "np.ndarray"


def value_array(record: ValueRecord) -> HostArray | None:
    """Return the array that Orbax reads for a value, or None for None, strings, and ints of more than 64 bits.

    bool, int and float become arrays without axes, of bool, int64 (uint64 from 2**63 on) and float64,
    as Orbax writes them. A long list or tuple of one of these types becomes one array, because Orbax
    would store an array for each number. Orbax rejects complex and bytes; they become an array of
    complex128 without axes and an array of uint8.

    Raises:
        CorruptCheckpointError: the record does not have the core's encoding of values.
    """
    value = record.value
    try:
        match record.kind:
            case "bool" if isinstance(value, bool):
                return np.asarray(value)
            case "int" if (number := _int_of(value)) is not None:
                if -(1 << 63) <= number < 1 << 63:
                    return np.asarray(number, np.int64)
                return np.asarray(number, np.uint64) if 0 <= number < 1 << 64 else None
            case "float":
                return np.asarray(float_from_json(value), np.float64)
            case "complex" if isinstance(value, list | tuple) and len(value) == 2:
                return np.asarray(complex(float_from_json(value[0]), float_from_json(value[1])), np.complex128)
            case "bytes" if isinstance(value, str):
                return np.frombuffer(base64.b64decode(value, validate=True), np.uint8)
            case "list" | "tuple":
                return column_array(record)
            case "bool" | "int" | "complex" | "bytes":
                raise ValueError(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise CorruptCheckpointError(f"a saved {record.kind} cannot be read from {str(value)[:80]!r}") from error
    return None


def value_text(record: ValueRecord) -> str | None:
    """Return the string that Orbax reads for a value; None for None and for values stored as arrays.

    An int of more than 64 bits becomes hexadecimal text. A value that is neither str nor int, such
    as a long dict of numbers in one leaf, becomes JSON. Characters that UTF-8 cannot encode are
    replaced, because other readers reject files that contain them.
    """
    if record.kind == "none" or value_array(record) is not None:
        return None
    value = record.value
    if record.kind in ("list", "tuple", "dict"):
        return json.dumps(column_value(record))
    if record.kind == "str" and isinstance(value, dict):
        return base64.b64decode(str(value.get("utf8"))).decode("utf-8", "replace")
    return value if isinstance(value, str) else json.dumps(value)


def _int_of(value: JSON) -> int | None:
    if isinstance(value, str):
        return int(value, 16)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


MAX_DEPTH: Final = 200
"""Maximum depth of a tree, in containers. The core has the same limit."""

Steps: TypeAlias = tuple[int | str, ...]
"""Path to a leaf: an int is an index of a sequence, a str is any other key."""


@dataclass(frozen=True, slots=True)
class TreeLeaf:
    """A leaf of a stored tree.

    Attributes:
        name: name of its array in the store.
        value_type: Orbax's type name (``jax.Array``, ``np.ndarray``, ``scalar``, ``string``, ``None``);
            empty if unknown.
        value: the value, if it is not an array. A ``scalar`` stored as an array has none yet.
        embedded: its elements, if they are few and a metadata file contains them.
        extent: key of the file that contains its elements uncompressed, and their byte range in it; None if unknown.
        spec: shape and dtype, if already known.
        kind: kind for the `ArrayRecord`, if already known: ``numpy.scalar``; else None.
        shared: whether another leaf has the same name. Orbax then overwrote one of the two arrays.
    """

    name: str
    value_type: str = ""
    value: ValueRecord | None = None
    embedded: HostArray | None = None
    extent: tuple[str, int, int] | None = None
    spec: ArraySpec | None = None
    kind: str | None = None
    shared: bool = False

    @property
    def is_embedded(self) -> bool:
        """True if its elements are in a metadata file. Then `spec` is known."""
        return self.embedded is not None or self.extent is not None


@dataclass(frozen=True, slots=True)
class OrbaxTree:
    """A tree. `leaves` are in the order of the skeleton."""

    skeleton: Skeleton
    leaves: tuple[TreeLeaf, ...]


@dataclass(frozen=True, slots=True)
class ContainerType:
    """Type of a container.

    Attributes:
        kind: ``tuple``, or ``object``, whose keys are attributes.
        type: qualified name of its type, or None.
    """

    kind: Literal["tuple", "object"]
    type: str | None = None


class _OpenContainer(dict["int | str", "_OpenContainer | TreeLeaf | Node"]):
    """A container under construction."""


def build_tree(
    entries: Iterable[tuple[Steps, TreeLeaf | Node]],
    key: str,
    containers: Mapping[tuple[str, ...], ContainerType] | None = None,
) -> OrbaxTree:
    """Build a tree from leaves and empty containers with their paths.

    A container whose keys are the indices from 0 on, in any order, is a list, or a tuple if
    `containers` says so. With gaps it is a dict with int keys.

    Args:
        entries: the leaves and empty containers; may be hostile.
        key: the file that contains them, for errors.
        containers: types of containers, by path as text.

    Raises:
        CorruptCheckpointError: the entries do not form a tree.
    """
    root: _OpenContainer | TreeLeaf | Node | None = None
    for steps, leaf in entries:
        if len(steps) > MAX_DEPTH:
            raise CorruptCheckpointError(
                f"{key}: a leaf is in {len(steps)} nested containers; expected at most {MAX_DEPTH}", key=key
            )
        if not steps:
            if root is not None:
                raise _duplicate(key, steps)
            root = leaf
            continue
        if root is None:
            root = _OpenContainer()
        branch = root
        for step in steps[:-1]:
            if not isinstance(branch, _OpenContainer):
                raise _duplicate(key, steps)
            branch = branch.setdefault(step, _OpenContainer())
        if not isinstance(branch, _OpenContainer) or branch.setdefault(steps[-1], leaf) is not leaf:
            raise _duplicate(key, steps)
    if root is None:
        raise CorruptCheckpointError(f"{key}: expected a tree, found no leaf", key=key)
    leaves: list[TreeLeaf] = []
    return OrbaxTree(_finished_skeleton(root, (), containers or {}, leaves), tuple(leaves))


def tree_of_names(names: Iterable[str], key: str) -> OrbaxTree:
    """Build a tree from array names if no file describes it: dicts nested at each dot, as in Orbax.

    Returns one flat dict if one name is a prefix path of another, or if a name has too many dots.

    Raises:
        CorruptCheckpointError: there are no names.
    """
    known = set(names)
    ordered = sorted(known)
    # Prefixes are generated lazily and only for names with few dots: all prefixes of a long name
    # that consists of dots take 2 GiB.
    nested = all(name.count(".") < MAX_DEPTH for name in ordered) and not any(
        name[:position] in known for name in ordered for position in _dots(name)
    )
    return build_tree(((tuple(name.split(".")) if nested else (name,), TreeLeaf(name)) for name in ordered), key)


def _dots(name: str) -> Iterator[int]:
    return (position for position, character in enumerate(name) if character == ".")


def plain_tree(value: object, key: str) -> OrbaxTree:
    """Build a tree from dicts, lists and tuples of Python values or `TreeLeaf`s. None is a leaf.

    Raises:
        CorruptCheckpointError: the value contains another type, or is too deep.
    """
    leaves: list[TreeLeaf] = []

    def node(inner: object, depth: int) -> Skeleton:
        if depth > MAX_DEPTH:
            raise CorruptCheckpointError(f"{key}: expected at most {MAX_DEPTH} nested containers", key=key)
        if isinstance(inner, dict):
            for child in inner:
                if type(child) not in (str, int):
                    raise CorruptCheckpointError(f"{key}: expected keys of str or int, found {child!r:.80}", key=key)
            return Node("dict", tuple(inner), tuple([node(child, depth + 1) for child in inner.values()]))
        if isinstance(inner, list | tuple):
            kind: Literal["list", "tuple"] = "tuple" if isinstance(inner, tuple) else "list"
            return Node(kind, tuple(range(len(inner))), tuple([node(child, depth + 1) for child in inner]))
        if isinstance(inner, TreeLeaf):
            leaves.append(inner)
            return LEAF
        record = value_record(inner)
        if record is None:
            raise CorruptCheckpointError(f"{key}: found a {type(inner).__name__}, which cannot be in a tree", key=key)
        leaves.append(TreeLeaf("", value=record))
        return LEAF

    return OrbaxTree(node(value, 0), tuple(leaves))


def _finished_skeleton(
    part: _OpenContainer | TreeLeaf | Node,
    path: tuple[str, ...],
    containers: Mapping[tuple[str, ...], ContainerType],
    leaves: list[TreeLeaf],
) -> Skeleton:
    if isinstance(part, TreeLeaf):
        leaves.append(part)
        return LEAF
    if isinstance(part, Node):
        return part
    container = containers.get(path)
    steps = list(part)
    if all(isinstance(step, int) for step in steps):
        steps.sort()
    kind: Literal["dict", "list", "tuple", "object"] = "dict"
    keys: tuple[Key, ...] = tuple(steps)
    if keys == tuple(range(len(keys))):
        kind = "tuple" if container is not None and container.kind == "tuple" else "list"
    elif container is not None and container.kind == "object" and all(isinstance(step, str) for step in steps):
        kind, keys = "object", tuple([Attribute(str(step)) for step in steps])
    children = tuple([_finished_skeleton(part[step], (*path, str(step)), containers, leaves) for step in steps])
    return Node(kind, keys, children, container.type if container is not None and kind == "object" else None)


def _duplicate(key: str, steps: Steps) -> CorruptCheckpointError:
    way = "/".join(map(str, steps))[:200]
    return CorruptCheckpointError(f"{key}: expected one leaf at {way!r}, found a leaf and another entry", key=key)
