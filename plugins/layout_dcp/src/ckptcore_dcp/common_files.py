"""``common.pt`` of Megatron: the part of a state that its tensors in torch.distributed.checkpoint lack.

The strategy ``torch_dist`` of megatron-core (0.16.1, ``dist_checkpointing/strategies``) writes the
tensors and objects of all processes with torch.distributed.checkpoint, under their own keys, and the
rest with ``torch.save``. ``metadata.json`` names the strategy. A load of Megatron merges both.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import Node, unreadable_leaf
from ckptcore.model.tree import leaf_count
from ckptcore.protocols import ReadStore
from ckptcore_dcp.metadata import DcpMetadata
from ckptcore_dcp.torch_files import read_torch_file
from ckptcore_dcp.values import DecodedValue

_COMMON: Final = "common.pt"
_CONFIG: Final = "metadata.json"
_OF_COMMON: Final = "torch"
"""The strategy of megatron-core that writes ``common.pt``, also if the state has nothing else."""
_MAX_CONFIG: Final = 1 << 16


def with_common(
    metadata: DcpMetadata, store: ReadStore, names: Sequence[str]
) -> tuple[DcpMetadata, Mapping[str, DecodedValue]]:
    """Return the values in ``common.pt`` of a directory of Megatron; none for other directories.

    A name that the metadata has too, and a file that is missing or cannot be read, become leaves that cannot be loaded.

    Args:
        metadata: the tensors.
        store: the files.
        names: the names in the directory.
    """
    config = _config_of_megatron(store) if _CONFIG in names else {}
    if not config or (_COMMON not in names and config.get("common_backend") != _OF_COMMON):
        return metadata, {}
    try:
        if _COMMON not in names:
            raise CorruptCheckpointError(
                f"{_COMMON}, in which {_CONFIG} says the rest of the state is, is missing: restore it from a copy",
                key=_COMMON,
            )
        found = read_torch_file(store, _COMMON)
        if found is None or not isinstance(found.skeleton, Node) or found.skeleton.kind != "dict":
            raise CorruptCheckpointError(
                f"{_COMMON} is not a dict in a file of torch.save: restore it from a copy", key=_COMMON
            )
    except (CorruptCheckpointError, UnsupportedLeafError) as error:
        return replace(metadata, unreadable={**metadata.unreadable, _COMMON: unreadable_leaf(error)}), {}
    counts = [leaf_count(child) for child in found.skeleton.children]
    bounds = itertools.pairwise([0, *itertools.accumulate(counts)])
    values = {
        str(key): DecodedValue(child, found.leaves[first:last], _COMMON, found.storages)
        for key, child, (first, last) in zip(found.skeleton.keys, found.skeleton.children, bounds, strict=True)
    }
    both = [name for name in metadata.names if name in values]
    refused = {
        name: unreadable_leaf(
            UnsupportedLeafError(
                f"{name!r} is in {_COMMON} and in .metadata: load {_COMMON} by its own path for the first one"
            )
        )
        for name in both
    }
    metadata = replace(
        metadata,
        tensors={name: tensor for name, tensor in metadata.tensors.items() if name not in refused},
        values={name: value for name, value in metadata.values.items() if name not in refused},
        unreadable={**metadata.unreadable, **refused},
    )
    return metadata, {name: value for name, value in values.items() if name not in refused}


def _config_of_megatron(store: ReadStore) -> Mapping[str, object]:
    """Return the content of ``metadata.json``; empty if it is of other software."""
    try:
        config: Any = json.loads(store.get(_CONFIG, 0, _MAX_CONFIG))
    except (ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) and "sharded_backend" in config else {}
