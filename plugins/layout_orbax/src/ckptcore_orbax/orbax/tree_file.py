"""The file `_METADATA`: the tree of an item, and how its arrays are stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from ckptcore.model import JSON, Attribute, LeafRecord, Node, Skeleton, TreeMetadata, TreePath, are_indices
from ckptcore_orbax.orbax.json_files import (
    encode_json,
    expect_object,
    expect_shape,
    expect_text,
    expect_type,
    parse_json,
    unexpected,
)
from ckptcore_orbax.orbax.trees import MAX_DEPTH, NONE, ContainerType, OrbaxTree, TreeLeaf, build_tree, value_type

_ENTRY: Final = "ValueMetadataEntry"


def _parse_containers(text: str, key: str) -> dict[tuple[str, ...], ContainerType]:
    """Return the tuples and named tuples in a ``value_metadata_tree``, by path.

    The text is JSON. Objects and arrays are containers; a tuple is ``{"category": "custom",
    "clazz": "tuple", "entries": [..]}``; a named tuple is ``{"category": "namedtuple", "module":
    .., "clazz": .., "entries": [{"key": .., "value": ..}, ..]}``; a leaf is ``{"category":
    "custom", "clazz": "ValueMetadataEntry", ..}``.

    Raises:
        CorruptCheckpointError: the text is invalid.
    """
    containers: dict[tuple[str, ...], ContainerType] = {}
    pending: list[tuple[tuple[str, ...], JSON]] = [((), parse_json(text.encode("utf-8", "surrogatepass"), key))]
    while pending:
        path, part = pending.pop()
        if len(path) > MAX_DEPTH:
            raise unexpected(key, f"at most {MAX_DEPTH} nested containers", len(path))
        if isinstance(part, list):
            pending.extend([((*path, str(number)), child) for number, child in enumerate(part)])
            continue
        members = expect_object(part, key, "a container of value_metadata_tree")
        category, name = members.get("category"), members.get("clazz")
        if category == "custom" and name == _ENTRY:
            continue
        if category == "custom" and name == "tuple":
            containers[path] = ContainerType("tuple")
            entries = expect_type(members.get("entries"), list, key, "the entries of a tuple")
            pending.extend([((*path, str(number)), child) for number, child in enumerate(entries)])
        elif category == "namedtuple":
            module = expect_text(members.get("module"), key, "the module of a named tuple")
            containers[path] = ContainerType(
                "object", f"{module}.{expect_text(name, key, 'the name of a named tuple')}"
            )
            for entry in expect_type(members.get("entries"), list, key, "the entries of a named tuple"):
                field = expect_object(entry, key, "a field of a named tuple")
                pending.append(((*path, expect_text(field.get("key"), key, "the name of a field")), field.get("value")))
        else:
            pending.extend([((*path, child_key), child) for child_key, child in members.items()])
    return containers


TREE_FILE: Final = "_METADATA"

_SEQUENCE: Final = 1
_OTHER: Final = 2
"""Types of keys: an index, or a key of a mapping or attribute name. All keys are text."""

_EMPTY: Final = {
    "Dict": Node("dict", (), ()),
    "List": Node("list", (), ()),
    "Tuple": Node("tuple", (), ()),
    "NamedTuple": Node("object", (), ()),
}
"""Empty containers, by value type."""


@dataclass(frozen=True, slots=True)
class TreeFile:
    """The contents of `_METADATA`.

    Attributes:
        tree: the tree; its strings have no value yet.
        use_ocdbt: whether arrays are in a database. None if not stated; Orbax then looks for one.
        use_zarr3: whether arrays are zarr 3, not 2.
        stores_fill_value: whether chunks that equal the fill value are stored too, so that a missing
            chunk is an error.
        custom: metadata that the Orbax user stored with the tree, or None.
    """

    tree: OrbaxTree
    use_ocdbt: bool | None
    use_zarr3: bool
    stores_fill_value: bool
    custom: JSON


def parse_tree(data: bytes, key: str) -> TreeFile:
    """Parse `_METADATA`, which may be hostile.

    Raises:
        CorruptCheckpointError: the file is invalid.
    """
    document = expect_object(parse_json(data, key), key, "the file")
    table = expect_object(document.get("tree_metadata"), key, "tree_metadata")
    entries = [_parse_entry(expect_object(entry, key, "an entry of tree_metadata"), key) for entry in table.values()]
    counts = Counter(leaf.name for _, leaf in entries if isinstance(leaf, TreeLeaf))
    entries = [
        (steps, replace(leaf, shared=True) if isinstance(leaf, TreeLeaf) and counts[leaf.name] > 1 else leaf)
        for steps, leaf in entries
    ]
    rich = document.get("value_metadata_tree")
    containers = None if rich is None else _parse_containers(expect_type(rich, str, key, "value_metadata_tree"), key)
    use_ocdbt = document.get("use_ocdbt")
    return TreeFile(
        build_tree(entries, key, containers),
        None if use_ocdbt is None else expect_type(use_ocdbt, bool, key, "use_ocdbt"),
        expect_type(document.get("use_zarr3", False), bool, key, "use_zarr3"),
        expect_type(document.get("store_array_data_equal_to_fill_value", False), bool, key, "a flag"),
        document.get("custom_metadata"),
    )


def _parse_entry(entry: dict[str, JSON], key: str) -> tuple[tuple[int | str, ...], TreeLeaf | Node]:
    steps: list[int | str] = []
    names: list[str] = []
    for part in expect_type(entry.get("key_metadata"), list, key, "key_metadata"):
        step = expect_object(part, key, "a key")
        name = expect_text(step.get("key"), key, "a key")
        names.append(name)
        match step.get("key_type"):
            case 1:
                if not name.isascii() or not name.isdigit() or len(name) > 18:
                    raise unexpected(key, "an index of a sequence", name)
                steps.append(int(name))
            case 2:
                steps.append(name)
            case other:
                raise unexpected(key, "1 or 2 as key_type", other)
    members = expect_object(entry.get("value_metadata"), key, "value_metadata")
    kind = expect_text(members.get("value_type"), key, "value_type")
    if "write_shape" in members:
        expect_shape(members["write_shape"], key, "write_shape")
    if kind in _EMPTY:
        return tuple(steps), _EMPTY[kind]
    return tuple(steps), TreeLeaf(".".join(names), kind, NONE if kind == "None" else None)


def orbax_name(path: TreePath) -> str:
    """Return the name by which Orbax finds a leaf: its keys as text, joined by dots."""
    return ".".join(map(str, path))


def encode_tree(
    tree: TreeMetadata,
    write_shapes: Mapping[int, tuple[int, ...]],
    *,
    use_ocdbt: bool,
    use_zarr3: bool,
) -> bytes:
    """Return the file `_METADATA` of a tree.

    Orbax has no int keys and no attribute names: both become text. An empty object becomes None,
    like an empty named tuple of JAX. If several leaves have equal keys as text, only the
    first one is described.

    Args:
        tree: the tree to save.
        write_shapes: shape of a shard, which one process writes at once, for leaves that are JAX arrays.
        use_ocdbt: True if a database contains the arrays.
        use_zarr3: True if the arrays are zarr 3, not 2.
    """
    table: dict[str, JSON] = {}
    leaves = iter(enumerate(tree.leaves))
    for keys, number, kind in _leaf_entries(tree.skeleton, (), leaves):
        value: dict[str, JSON] = {"value_type": kind, "skip_deserialize": kind in _EMPTY or kind == "None"}
        if kind == "jax.Array" and number in write_shapes:
            value["write_shape"] = write_shapes[number]
        name = str(tuple([text for text, _ in keys]))
        described: list[JSON] = [{"key": text, "key_type": key_type} for text, key_type in keys]
        table.setdefault(name, {"key_metadata": described, "value_metadata": value})
    return encode_json(
        {
            "tree_metadata": table,
            "use_ocdbt": use_ocdbt,
            "use_zarr3": use_zarr3,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
    )


def _leaf_entries(
    part: Skeleton, path: tuple[tuple[str, int], ...], leaves: Iterator[tuple[int, LeafRecord]]
) -> Iterator[tuple[tuple[tuple[str, int], ...], int, str]]:
    """Yield the keys with their types, the number and the value type of each leaf and empty container.

    A container has the number -1.
    """
    if not isinstance(part, Node):
        number, record = next(leaves)
        yield path, number, value_type(record)
        return
    if not part.children:
        kinds = {"list": "List", "tuple": "Tuple", "object": "None"}
        yield path, -1, kinds.get(part.kind, "Dict")
        return
    # JAX numbers the children of an object without key names, and Orbax restores them as a list.
    counted = part.kind == "object" and are_indices(part.keys)
    key_type = _SEQUENCE if part.kind in ("list", "tuple") or counted else _OTHER
    for child_key, child in zip(part.keys, part.children, strict=True):
        text = child_key.name if isinstance(child_key, Attribute) else str(child_key)
        yield from _leaf_entries(child, (*path, (text, key_type)), leaves)
