"""The files that stand beside the arrays of a tree that is saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ckptcore.model import JSON, ArrayRecord, TreeMetadata, ValueRecord
from ckptcore_orbax.orbax.array_metadata import ARRAY_METADATA, ArrayMetadata, encode_array_metadata
from ckptcore_orbax.orbax.shardings import SHARDING_FILE, encode_shardings
from ckptcore_orbax.orbax.strings import STRINGS_FILE, encode_strings
from ckptcore_orbax.orbax.tree_file import TREE_FILE, encode_tree, orbax_name
from ckptcore_orbax.orbax.values import value_text, value_type

__all__ = ["item_files"]


def item_files(
    tree: TreeMetadata,
    shapes: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]],
    *,
    use_ocdbt: bool,
    use_zarr3: bool,
    custom: JSON = None,
) -> dict[str, bytes]:
    """The files beside the arrays of a tree, by their names in the directory of the item.

    What Orbax finds by a name is left out where several leaves have that name: it finds nothing, and never another leaf.

    Args:
        tree: what is saved.
        shapes: of each leaf that is an array, by its number: what one process writes at once, and what can be read at once.
        use_ocdbt, use_zarr3: how arrays are stored.
        custom: metadata of the user's for this tree.
    """
    names = [orbax_name(path) for path in tree.paths]
    counts = Counter(names)
    strings: dict[str, str] = {}
    shardings: dict[str, JSON] = {}
    arrays: list[ArrayMetadata] = []
    for number, (name, record) in enumerate(zip(names, tree.leaves, strict=True)):
        if counts[name] > 1:
            continue
        if isinstance(record, ValueRecord):
            if (text := value_text(record)) is not None:
                strings[name] = text
        elif value_type(record) == "jax.Array":
            if "sharding" in record.notes:
                shardings[name] = record.notes["sharding"]
            write_shape, chunk_shape = shapes.get(number, (record.spec.shape, record.spec.shape))
            arrays.append(ArrayMetadata(name, write_shape, chunk_shape, _impl(record)))
    write_shapes = {number: write_shape for number, (write_shape, _) in shapes.items()}
    files = {
        TREE_FILE: encode_tree(tree, write_shapes, use_ocdbt=use_ocdbt, use_zarr3=use_zarr3, custom=custom),
        SHARDING_FILE: encode_shardings(shardings),
    }
    if strings:
        files[STRINGS_FILE] = encode_strings(strings)
    if arrays:
        files[f"{ARRAY_METADATA}/process_0"] = encode_array_metadata(arrays)
    return files


def _impl(record: ArrayRecord) -> str | None:
    impl = record.notes.get("impl")
    return impl if record.kind == "jax.key" and isinstance(impl, str) else None
