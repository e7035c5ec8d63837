"""Files with state in the directory of a checkpoint of other software that are no part of the checkpoint.

A load, a conversion and a consolidation leave them out: ``optimizer.pt`` of a trainer, and shards and tensors that an
index does not name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Final

from ckptcore.commit.location import AnyLocation
from ckptcore.context import Context
from ckptcore.errors import CheckpointError, CorruptCheckpointError, TreeMismatchError
from ckptcore.model.metadata import unreadable_error
from ckptcore.opening.checkpoint import Checkpoint, CompositeCheckpoint, extents_of
from ckptcore.opening.members import open_member, present_members
from ckptcore.opening.open_checkpoints import ConsistentRead, open_either
from ckptcore.protocols import StorageBackend

_STATE: Final = re.compile(
    r".*\.(pt|pth|ckpt|bin|pkl|pickle|npz|npy|msgpack|h5|hdf5|keras|safetensors|tar)|trainer_state\.json"
)
"""Names of files that hold the state of a training. Configs, tokenizers and texts hold none."""

_OTHER_FORMATS: Final = re.compile(
    r"(pytorch_model|tf_model|flax_model|diffusion_pytorch_model|diffusion_flax_model|model|consolidated)\b"
    r".*\.(bin|safetensors|h5|hdf5|msgpack|pth|npz)"
)
"""Names of the weights of one model, which repositories have in several formats next to each other."""

_OF_OTHERS: Final = (".gguf", ".onnx", ".tflite")
"""Suffixes of models for other software, next to the weights that they were made of."""

_ARGUMENTS: Final = "training_args.bin"
"""Arguments of the Trainer of transformers. Repositories of models have this file too."""

_FOLDERS: Final = ("original", "onnx", "openvino", "coreml")
"""Folders in repositories of models, with the same weights for other software."""

_OF_THEIR_OWN: Final = re.compile(
    r"(checkpoint|step|epoch|iter)[-_=]?\w*\d+(\.ckpt)?|wandb|mlruns|runs|logs|lightning_logs"
)
"""Folders in the directory of a run that are other steps, or logs."""

_MOST_NAMED: Final = 8
_BEGIN_BYTES: Final = 16


def left_out_of(found: Checkpoint | CompositeCheckpoint, source: AnyLocation, context: Context) -> tuple[str, ...]:
    """Return the files with state that are no part of a checkpoint, and ``file: tensors`` for those of a file.

    Checkpoints of ckptcore list their files, so nothing is left out of them.
    """
    if found.root is not None or found.version.is_object:
        return ()
    read, tensors = _read_by(found, source, context)
    suffixes = {key.rpartition(".")[2] for key in read}
    store = found.location.store
    files = [
        key
        for key in store.list()
        if key not in read and _has_state(key, suffixes, read) and (key.endswith(".json") or not _is_empty(store, key))
    ]
    return (*sorted(files), *tensors)


def _other_weights_of(
    found: Checkpoint | CompositeCheckpoint, source: AnyLocation, context: Context, left_out: Collection[str]
) -> tuple[str, ...]:
    """Return the files next to a checkpoint of other software that have its weights in another format, by their names.

    Copies leave them out without an error. Each can be loaded by its own location. `left_out` is `left_out_of` it.
    """
    if found.root is not None or found.version.is_object:
        return ()
    read, _ = _read_by(found, source, context)
    names = [name for name in found.location.store.list_names() if name not in read and name not in left_out]
    return tuple([name for name in names if _OTHER_FORMATS.fullmatch(name) or name.endswith(_OF_OTHERS)])


def _read_by(
    found: Checkpoint | CompositeCheckpoint, source: AnyLocation, context: Context
) -> tuple[set[str], list[str]]:
    """Return the files that a load reads, and ``file: tensors`` for the tensors of them that it does not load."""
    location = found.location
    read: set[str] = set()
    tensors: list[str] = []
    if isinstance(found, CompositeCheckpoint):  # a checkpointable may be a file
        read.update(directory for directories in present_members(found).values() for directory in directories)
    for prefix, opened in _trees(found, source, context):
        one = opened
        while one.derived is not None:  # what it is computed from is no part of its tree
            one = one.derived.sources[0]
        read.update(f"{prefix}{key}" for key in (*one.objects, *one.origin.files))
        read.update(f"{prefix}{key}" for _, key, _, _ in extents_of(one))
        errors = [error for record in one.tree.leaves if (error := unreadable_error(record))]
        read.update(f"{prefix}{error.key}" for error in errors if isinstance(error, CorruptCheckpointError))
        names = {str(path[-1]) for path in one.tree.paths if path}
        for key, unused in one.origin.unused.items():
            read.add(f"{prefix}{key}")
            if lost := [name for name in unused if name not in names]:
                more = f" and {len(lost) - _MOST_NAMED} more" if len(lost) > _MOST_NAMED else ""
                tensors.append(f"{prefix}{key}: {', '.join(lost[:_MOST_NAMED])}{more}")
            elif not unused and not _is_empty(location.store, f"{prefix}{key}"):
                tensors.append(f"{prefix}{key}")  # no index names this file
    return read, tensors


def in_directory_of(source: AnyLocation, context: Context) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Open a checkpoint and return `left_out_of` and `_other_weights_of` it."""

    def find(found: Checkpoint | CompositeCheckpoint) -> tuple[tuple[str, ...], tuple[str, ...]]:
        left_out = left_out_of(found, source, context)
        return left_out, _other_weights_of(found, source, context, left_out)

    return ConsistentRead(source, context, open_either).retry_if_replaced(find)


def check_left_out(
    found: Checkpoint | CompositeCheckpoint,
    source: AnyLocation,
    told: Collection[str],
    context: Context,
    *,
    tensors: bool = True,
) -> None:
    """Check that a copy in another form loses no state.

    Args:
        found: the checkpoint.
        source: its location.
        told: names or patterns of files that may be left out.
        context: opens checkpointables.
        tensors: False to allow that tensors are lost that an index omits.

    Raises:
        TreeMismatchError: names the files and tensors that it would lose.
    """
    lost = [
        name
        for name in left_out_of(found, source, context)
        if (tensors or ": " not in name) and not matches_any(name.partition(": ")[0], told)
    ]
    if lost:
        more = f" and {len(lost) - _MOST_NAMED} more" if len(lost) > _MOST_NAMED else ""
        raise TreeMismatchError(
            f"{found.location.display}: {'; '.join(lost[:_MOST_NAMED])}{more}: no part of the checkpoint in this "
            "directory, so the copy would lose it. Copy the directory as it is, without layout and subtree; or, if it "
            "is not needed, pass leave_out=[...] with the names of the files, or leave_out=['*']. Nothing was written",
            [f"left out: {name}" for name in lost],
        )


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return True if a name is one of these names, or matches one of these patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _trees(
    found: Checkpoint | CompositeCheckpoint, source: AnyLocation, context: Context
) -> Iterable[tuple[str, Checkpoint]]:
    if isinstance(found, Checkpoint):
        return [("", found)]
    opened = []
    for name, directories in present_members(found).items():
        for directory in directories:
            try:
                opened.append((f"{directory}/", open_member(found, name, directory, source, context)))
            except CheckpointError:
                continue  # the caller reports it
    return opened


def _has_state(key: str, read_suffixes: Collection[str], read: Collection[str]) -> bool:
    directory, _, name = key.rpartition("/")
    folders: Sequence[str] = directory.split("/") if directory else ()
    if not _STATE.fullmatch(name) or name == _ARGUMENTS or any(folder.startswith(".") for folder in folders):
        return False
    if folders and (folders[0] in _FOLDERS or _OF_THEIR_OWN.fullmatch(folders[0])):
        return False
    beside = {other.rpartition("/")[2] for other in read if other.rpartition("/")[0] == directory}
    suffix = name.rpartition(".")[2]
    if suffix in ("bin", "safetensors") and any(_stem(other) == _stem(name) for other in beside):
        return suffix in read_suffixes  # the same weights in another format, or a shard
    if not beside or not _OTHER_FORMATS.fullmatch(name):
        return True
    if suffix not in read_suffixes or name.startswith("consolidated"):
        return False
    # a variant such as model.fp16.safetensors has the same weights in another dtype; a shard has others
    return not any(_stem(name).startswith(f"{_stem(other)}.") for other in beside)


def _is_empty(store: StorageBackend, key: str) -> bool:
    """Return True for a file with a text in place of a state, such as a pointer of Git LFS, or without any tensor."""
    size = store.size(key)
    if not size:
        return True
    begin = store.get(key, 0, min(size, _BEGIN_BYTES))
    if key.endswith(".safetensors") and size == 8 + int.from_bytes(begin[:8], "little"):  # it has only a header
        return True
    return begin.isascii() and begin.decode().replace("\n", " ").isprintable()


def _stem(name: str) -> str:
    return re.sub(r"-\d{5}-of-\d{5}", "", name.rpartition(".")[0])
