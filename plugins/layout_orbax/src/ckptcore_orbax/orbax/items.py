"""Items of Orbax in a directory: a tree with arrays, a JSON document, a protobuf message, or random keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError, UncommittedCheckpointError
from ckptcore.model import JSON, LEAF, PLAIN_ARRAY, ArrayRecord, ArraySpec, Node, TreeMetadata
from ckptcore.model.file_kinds import FILE_HEAD_BYTES, file_kind
from ckptcore.protocols import ReadStore
from ckptcore_orbax.orbax.aggregate import AGGREGATE_FILE, OTHER_PROCESSES, is_aggregate, parse_aggregate
from ckptcore_orbax.orbax.item_files import ARRAY_METADATA, STRINGS_FILE, Strings, parse_array_metadata
from ckptcore_orbax.orbax.json_files import expect_object, parse_json
from ckptcore_orbax.orbax.markers import COMMIT_FILE, METADATA_FILE, CheckpointFile, parse_checkpoint_file
from ckptcore_orbax.orbax.shardings import SHARDING_FILE, parse_shardings
from ckptcore_orbax.orbax.tree_file import TREE_FILE, parse_tree
from ckptcore_orbax.orbax.trees import NONE, OrbaxTree, TreeLeaf, plain_tree, tree_of_names, value_record
from ckptcore_orbax.zarr.documents import is_group

ItemKind = Literal["tree", "array", "json", "proto", "random key"]
"""Kind of an item. ``array``: one array or number, which Orbax's handler stores as the only entry of a dict."""

TEMPORARY: Final = ".orbax-checkpoint-tmp"
"""Part of the name of a directory whose save is incomplete."""

_HEAD_BYTES: Final = 64
_MANIFEST: Final = "manifest.ocdbt"
_PROCESSES: Final = "ocdbt.process_"
_JSON_FILES: Final = ("data.json", "metadata", "metrics")
_PROTO_FILE: Final = "proto.pbtxt"
_RANDOM_KEYS: Final = ("jax_random_key", "np_random_key")
_OF_KEY: Final = "_metadata"
"""Suffix of a directory next to the directory of a random key. Its JSON file states the form of the key."""
_DEFAULT_RANDOM_KEYS: Final = "threefry2x32"
"""JAX's default implementation. The handler does not store it."""
_ARRAY: Final = "checkpoint"
"""Name under which the handler of arrays stores its array, unless the program gives it another one."""

_HANDLERS: Final[Mapping[str, ItemKind]] = {
    "PyTreeHandler": "tree",
    "PyTreeCheckpointHandler": "tree",
    "StandardCheckpointHandler": "tree",
    "ArrayCheckpointHandler": "array",
    "JsonCheckpointHandler": "json",
    "ProtoCheckpointHandler": "proto",
    "JaxRandomKeyCheckpointHandler": "random key",
    "NumpyRandomKeyCheckpointHandler": "random key",
}
"""Kinds of items by class name of the handler. The names are compared as text; no class is imported."""


@dataclass(frozen=True)
class Item:
    """An item, with its metadata files parsed.

    Attributes:
        kind: kind of item.
        directory: directory of the arrays in the store; empty for the store's own directory.
        tree: its tree. None if there is only a database, whose keys give the array names
            (`tree_of_names`).
        database: whether an OCDBT database contains the arrays; otherwise each has a directory.
        zarr_format: zarr version of the arrays; None if not stated.
        missing: meaning of a missing chunk. ``error``: damage. ``fill``: it consists of the fill value,
            because older versions of Orbax did not store such chunks.
        shardings: sharding notes of JAX arrays, by name.
        random_keys: JAX's random key implementation, by name of the array that contains the key data.
        custom: the user's metadata.
        created: start time of the save, ISO 8601 in UTC; None if not stated here.
        writer: software that wrote it, as far as known.
    """

    kind: ItemKind
    directory: str
    tree: OrbaxTree | None
    writer: str
    database: bool = False
    zarr_format: Literal[2, 3] | None = None
    missing: Literal["error", "fill"] = "fill"
    shardings: Mapping[str, Mapping[str, JSON]] = field(default_factory=dict)
    random_keys: Mapping[str, str] = field(default_factory=dict)
    custom: Mapping[str, JSON] = field(default_factory=dict)
    created: str | None = None

    def record(self, leaf: TreeLeaf, spec: ArraySpec) -> ArrayRecord:
        """Return the record of an array, as the handler that saved it would create it.

        Args:
            leaf: leaf of the tree.
            spec: shape and dtype from the array's own metadata.
        """
        notes: dict[str, JSON] = {}
        impl = self.random_keys.get(leaf.name)
        if self.kind == "random key" and spec.shape[-1:] != (2,):
            impl = None  # not the default: the program used another implementation, which Orbax does not store
        if impl is not None:
            notes["impl"] = impl
        if leaf.name in self.shardings:
            notes["sharding"] = self.shardings[leaf.name]
        if leaf.shared:
            notes["shared_name"] = leaf.name
        return ArrayRecord(spec, leaf.kind or (PLAIN_ARRAY if impl is None else "jax.key"), notes=notes)


def names_in(store: ReadStore, directory: str) -> frozenset[str]:
    """Return the names in a directory; names of subdirectories end in ``/``.

    Raises:
        UncommittedCheckpointError: the directory name marks an incomplete save.
    """
    names = frozenset(store.list_names(directory))
    url = store.address.url if store.address is not None else ""
    if TEMPORARY in directory or TEMPORARY in url.rstrip("/").rpartition("/")[2]:
        raise UncommittedCheckpointError(
            f"{url or directory} is a temporary directory of Orbax: the save that wrote it did not finish. Load "
            "another step; if you know that it is complete, rename it"
        )
    return without_other_file(store, directory, names)


def without_other_file(store: ReadStore, directory: str, names: frozenset[str]) -> frozenset[str]:
    """Return the names. Drop the file ``checkpoint`` if other software, such as TensorFlow, wrote it.

    Orbax and Flax write it as msgpack, whose first byte is at least 0x80 unless the value is a small integer. A file
    that begins with a zero is kept, because it may be damaged.
    """
    if AGGREGATE_FILE not in names or not names.isdisjoint((TREE_FILE, METADATA_FILE, _MANIFEST)):
        return names
    key = key_in(directory, AGGREGATE_FILE)
    size = store.size(key)
    head = store.get(key, 0, min(size, FILE_HEAD_BYTES)) if size else b"\0"
    return names - {AGGREGATE_FILE} if file_kind(head, "") is not None or 0 < head[0] < 0x80 else names


def expect_commit(store: ReadStore, names: frozenset[str]) -> None:
    """Check the commit marker of an Orbax checkpoint on GCS, where Orbax does not rename complete directories.

    Raises:
        UncommittedCheckpointError: the marker is missing.
    """
    url = store.address.url if store.address is not None else ""
    if url.startswith(("gs://", "gcs://")) and names and COMMIT_FILE not in names and not _is_member(names):
        raise UncommittedCheckpointError(
            f"{url} has no {COMMIT_FILE}, which Orbax writes on GCS when a save is complete. Load another step; "
            f"if it is a copy of a complete checkpoint that lost the file, put an empty {COMMIT_FILE} there"
        )


def _is_member(names: frozenset[str]) -> bool:
    """Return whether names belong to a member of a checkpoint.

    Version 1 writes the commit marker only into the directory of the checkpoint.
    """
    return METADATA_FILE not in names


def key_in(directory: str, name: str) -> str:
    """Return the key of an object in a directory."""
    return f"{directory}/{name}" if directory else name


def kind_of_handler(handler: str) -> ItemKind | None:
    """Return the kind of items that a handler writes, from its class name; None if the class is unknown."""
    return _HANDLERS.get(handler.rpartition(".")[2])


def item_kind(names: frozenset[str], handler: str = "") -> ItemKind | None:
    """Return the kind of item in a directory with these names, or None.

    Args:
        names: the names in the directory.
        handler: class name of the handler that wrote the item; empty if unknown. Needed if the program chose the
            names of the files.
    """
    said = kind_of_handler(handler)
    if TREE_FILE in names or AGGREGATE_FILE in names or _MANIFEST in names:
        return "array" if said == "array" else "tree"
    if any(f"{name}/" in names for name in _RANDOM_KEYS) or (said == "random key" and _key_name(names)):
        return "random key"
    if (name := _only_file(names)) is not None:
        if said in ("json", "proto"):
            return said
        return "json" if name in _JSON_FILES else "proto" if name == _PROTO_FILE else None
    return None


def _only_file(names: frozenset[str]) -> str | None:
    """Return the only file of an item, apart from markers; None if it has several, or directories."""
    only = names - {COMMIT_FILE, METADATA_FILE}
    return next(iter(only)) if len(only) == 1 and not any(name.endswith("/") for name in only) else None


def _key_name(names: frozenset[str]) -> str | None:
    """Return the name of the directory of a random key, or None.

    There must be exactly two names: this directory, and a directory that states the form of the key.
    """
    names_of_keys = sorted(names - {COMMIT_FILE, METADATA_FILE})
    name = names_of_keys[0].removesuffix("/") if names_of_keys else ""
    return name if names_of_keys == [f"{name}/", f"{name}{_OF_KEY}/"] else None


def arrays_directory(store: ReadStore, directory: str) -> str:
    """Return the directory that contains the arrays of an item. For a random key, a nested item contains them."""
    names = frozenset(store.list_names(directory))
    name = _key_name(names)
    return directory if name is None else key_in(directory, name)


def find_item(store: ReadStore, directory: str = "") -> Item | None:
    """Return the item in a directory, with its metadata files read; None if there is no Orbax item.

    All files may be hostile.

    Args:
        store: the store.
        directory: directory of the item in the store, without a trailing ``/``.

    Raises:
        CorruptCheckpointError: a metadata file is invalid or missing.
        UnsupportedLeafError: an array in a metadata file has an unknown dtype.
        UncommittedCheckpointError: the save did not finish.
    """
    names = names_in(store, directory)
    checkpoint_file = CheckpointFile()
    if METADATA_FILE in names:
        key = key_in(directory, METADATA_FILE)
        checkpoint_file = parse_checkpoint_file(store.get(key), key)
    handler = checkpoint_file.handlers if isinstance(checkpoint_file.handlers, str) else ""
    kind = item_kind(names, handler)
    if kind is None:
        return _random_key(store, directory, names) or _bare_arrays(store, directory, names)
    if not directory:
        expect_commit(store, names)
    if kind == "random key":
        item = _random_key(store, directory, names)
    elif kind in ("tree", "array"):
        item = _tree_item(store, directory, names, checkpoint_file)
    else:
        item = _document(store, directory, names, kind)
    if item is None:
        return None
    return replace(item, custom={**checkpoint_file.custom, **item.custom}, created=checkpoint_file.created)


def find_file(store: ReadStore, name: str) -> Item | None:
    """Return the item in a Flax file; None for other files.

    A directory next to the file contains the arrays of other processes. Memory use is proportional to the file size.

    Raises:
        CorruptCheckpointError: the file is damaged or incomplete.
    """
    if not is_aggregate(store.get(name, 0, _HEAD_BYTES), name):
        return None
    tree = parse_aggregate(store.get(name), name)
    return Item("tree", f"{name}{OTHER_PROCESSES}", tree, "Flax (msgpack)", zarr_format=2)


def _document(store: ReadStore, directory: str, names: frozenset[str], kind: ItemKind) -> Item | None:
    """Return the item that consists of one file: a JSON document, or a protobuf message as text."""
    name = _only_file(names)
    if name is None:
        return None
    key = key_in(directory, name)
    data = store.get(key)
    if kind == "json":
        return Item("json", directory, plain_tree(parse_json(data, key), key), "Orbax (JSON)")
    record = value_record(data.decode("utf-8", "surrogateescape"))
    return Item("proto", directory, OrbaxTree(LEAF, (TreeLeaf("", value=record),)), "Orbax (text of protobuf)")


def _tree_item(store: ReadStore, directory: str, names: frozenset[str], checkpoint_file: CheckpointFile) -> Item:
    handler = checkpoint_file.handlers if isinstance(checkpoint_file.handlers, str) else ""
    is_array = kind_of_handler(handler) == "array"
    custom = dict(checkpoint_file.custom)
    tree: OrbaxTree | None = None
    zarr_format: Literal[2, 3] | None = None
    missing: Literal["error", "fill"] = "fill"
    writer = "Orbax"
    if TREE_FILE in names:
        key = key_in(directory, TREE_FILE)
        described = parse_tree(store.get(key), key)
        tree = described.tree
        zarr_format = 3 if described.use_zarr3 else 2
        missing = "error" if described.stores_fill_value else "fill"
        _add_custom(custom, described.custom)
        # In a checkpoint of several items, only the parent directory names the handler. The array handler is the only
        # one that never writes a database.
        is_array |= not handler and described.use_ocdbt is False and [leaf.name for leaf in tree.leaves] == [_ARRAY]
    if AGGREGATE_FILE in names:
        key = key_in(directory, AGGREGATE_FILE)
        aggregate = parse_aggregate(store.get(key), key)
        tree = aggregate if tree is None else _with_values(tree, aggregate)
        writer = "Orbax or Flax (msgpack)"
    if tree is not None:
        tree = _with_strings(store, directory, names, tree)
    database = _MANIFEST in names
    if not database and tree is not None and any(name.startswith(_PROCESSES) for name in names):
        within = f"{store.address.url.rstrip('/')}/" if store.address is not None else ""
        raise UncommittedCheckpointError(
            f"{within + directory or 'the directory'} has databases of processes but no {_MANIFEST}: the save ended "
            "before it merged them. Load another step"
        )
    shardings: Mapping[str, Mapping[str, JSON]] = {}
    if SHARDING_FILE in names:
        key = key_in(directory, SHARDING_FILE)
        shardings = parse_shardings(store.get(key), key)
    random_keys = _random_keys(store, directory, tree) if f"{ARRAY_METADATA}/" in names else {}
    if is_array and tree is not None and len(tree.leaves) == 1:
        tree = OrbaxTree(LEAF, tree.leaves)
    return Item(
        "array" if is_array else "tree",
        directory,
        tree,
        writer,
        database,
        zarr_format,
        missing,
        shardings,
        random_keys,
        custom,
    )


def _add_custom(custom: dict[str, JSON], tree_custom: JSON) -> None:
    """Merge the metadata of a tree into that of the checkpoint. If they conflict, add it as ``tree``."""
    if isinstance(tree_custom, dict) and not any(
        name in custom and custom[name] != tree_custom[name] for name in tree_custom
    ):
        custom.update(tree_custom)
    elif tree_custom is not None:
        custom["tree"] = tree_custom


def _with_values(tree: OrbaxTree, aggregate: OrbaxTree) -> OrbaxTree:
    """Add values and embedded arrays of an aggregate file to the leaves with equal paths, compared as text."""
    known = {name: leaf for name, leaf in _leaves_by_text(aggregate) if leaf.value is not None or leaf.is_embedded}
    leaves = [
        replace(known[name], name=leaf.name, value_type=leaf.value_type)
        if name in known and leaf.value is None
        else leaf
        for name, leaf in _leaves_by_text(tree)
    ]
    return OrbaxTree(tree.skeleton, tuple(leaves))


def _leaves_by_text(tree: OrbaxTree) -> list[tuple[tuple[str, ...], TreeLeaf]]:
    paths = TreeMetadata(tree.skeleton, (NONE,) * len(tree.leaves)).paths
    return [(tuple(map(str, path)), leaf) for path, leaf in zip(paths, tree.leaves, strict=True)]


def _with_strings(store: ReadStore, directory: str, names: frozenset[str], tree: OrbaxTree) -> OrbaxTree:
    if not any(leaf.value_type == "string" and leaf.value is None for leaf in tree.leaves):
        return tree
    key = key_in(directory, STRINGS_FILE)
    if STRINGS_FILE not in names:
        raise CorruptCheckpointError(f"{key} is missing, but the tree has strings", key=key)
    strings = Strings(store.get(key), key)
    leaves = [
        replace(leaf, value=value_record(strings.text(leaf.name)))
        if leaf.value_type == "string" and leaf.value is None
        else leaf
        for leaf in tree.leaves
    ]
    return OrbaxTree(tree.skeleton, tuple(leaves))


def _random_keys(store: ReadStore, directory: str, tree: OrbaxTree | None) -> dict[str, str]:
    """Return the implementations of random keys, by array name.

    Each process writes a file, which usually lists all arrays. Further files are read only while
    arrays are missing.
    """
    missing = {leaf.name for leaf in tree.leaves if leaf.value_type == "jax.Array"} if tree is not None else None
    keys: dict[str, str] = {}
    below = key_in(directory, ARRAY_METADATA)
    files = [name for name in store.list_names(below) if name.startswith("process_") and not name.endswith("/")]
    for name in sorted(files, key=lambda name: (len(name), name)):
        key = f"{below}/{name}"
        for array in parse_array_metadata(store.get(key), key):
            if missing is not None:
                missing.discard(array.name)
            if array.random_key_impl is None:
                continue
            if keys.setdefault(array.name, array.random_key_impl) != array.random_key_impl:
                raise CorruptCheckpointError(
                    f"{key}: {array.name!r} contains random keys of {array.random_key_impl!r}, but another "
                    f"process states {keys[array.name]!r}: restore the checkpoint from a copy, or load another one",
                    key=key,
                )
        if missing is not None and not missing:
            break
    return keys


def random_key_form(store: ReadStore, directory: str, names: frozenset[str]) -> tuple[str, Mapping[str, JSON]] | None:
    """Return the directory of a random key, and its form from a file next to it; None if there is no random key.

    A program may choose the name of the directory, so other items can have the same pattern of names. For such a
    name, the content of the file decides.
    """
    name = _key_name(names) or next((name for name in _RANDOM_KEYS if f"{name}/" in names), None)
    if name is None:
        return None
    key = key_in(directory, f"{name}{_OF_KEY}/metadata")
    try:
        form = parse_json(store.get(key), key)
    except ObjectNotFoundError:
        form = {}
    if name in _RANDOM_KEYS:
        return name, expect_object(form, key, "the file")
    return (name, form) if isinstance(form, dict) and form.keys() <= {"typed", "legacy"} and form else None


def _random_key(store: ReadStore, directory: str, names: frozenset[str]) -> Item | None:
    """Return an item of random keys: a nested item contains the array, or the state of NumPy's generator."""
    form = random_key_form(store, directory, names)
    if form is None:
        return None
    name, members = form
    item = find_item(store, key_in(directory, name))
    if item is None or item.tree is None:
        return None
    skeleton = item.tree.skeleton
    if isinstance(skeleton, Node):
        # NumPy's generator: a dict, or in its older form a tuple, which Orbax stores as a list.
        if skeleton.kind == "list" and members.get("legacy") is True:
            skeleton = skeleton._replace(kind="tuple")
        return replace(item, kind="random key", tree=OrbaxTree(skeleton, item.tree.leaves))
    (leaf,) = item.tree.leaves
    typed = {leaf.name: _DEFAULT_RANDOM_KEYS} if members.get("typed") is True else {}
    return replace(item, kind="random key", random_keys=typed)


def _bare_arrays(store: ReadStore, directory: str, names: frozenset[str]) -> Item | None:
    """Return the item in a directory that contains only directories of arrays, and no description of a tree.

    Returns None for a directory of zarr groups, whose metadata files have the same names.
    """
    ignored = {f"{ARRAY_METADATA}/", SHARDING_FILE, COMMIT_FILE, METADATA_FILE}
    directories = sorted(names - ignored)
    if not directories or not all(name.endswith("/") for name in directories):
        return None
    formats = set[Literal[2, 3]]()
    documents: list[str] = []
    for name in directories:
        inside = store.list_names(key_in(directory, name.removesuffix("/")))
        if ".zarray" in inside:
            formats.add(2)
        elif "zarr.json" in inside:
            formats.add(3)
            documents.append(key_in(directory, f"{name}zarr.json"))
        else:
            return None
    if any(is_group(data) for data in store.get_many([(key, 0, None) for key in documents]) if data is not None):
        return None
    if directories == [f"{_ARRAY}/"]:  # older versions of the array handler wrote no description of the tree
        tree = OrbaxTree(LEAF, (TreeLeaf(_ARRAY),))
    else:
        tree = tree_of_names([name.removesuffix("/") for name in directories], directory or ".")
    zarr_format = next(iter(formats)) if len(formats) == 1 else None
    return Item("tree", directory, tree, "Orbax, or arrays in directories", zarr_format=zarr_format)
