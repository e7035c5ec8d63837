"""Files with state that are in the directory of a checkpoint of other software, but not part of the checkpoint.

Loads, conversions and consolidations leave them out. Examples are ``optimizer.pt`` of a trainer, and shards and tensors
that an index does not name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final

from ckptcore.commit.location import AnyLocation
from ckptcore.context import Context
from ckptcore.errors import CorruptCheckpointError
from ckptcore.inspection.completeness import open_members
from ckptcore.model.metadata import unreadable_error
from ckptcore.opening.checkpoint import Checkpoint, CompositeCheckpoint, extents_of
from ckptcore.opening.members import member_opener, present_members
from ckptcore.protocols.storage import StorageBackend

_STATE: Final = re.compile(
    r".*\.(pt|pth|ckpt|bin|pkl|pickle|npz|npy|msgpack|h5|hdf5|keras|safetensors|tar)|trainer_state\.json"
)
"""Names of files with the state of a training run. Configs, tokenizers and texts have no state."""

OTHER_FORMATS: Final = re.compile(
    r"(pytorch_model|tf_model|flax_model|diffusion_pytorch_model|diffusion_flax_model|model|consolidated)\b"
    r".*\.(bin|safetensors|h5|hdf5|msgpack|pth|npz)"
)
"""Names of files with the weights of a model. A repository may have the same weights in several formats."""

_ARGUMENTS: Final = "training_args.bin"
"""Arguments of the Trainer of transformers. Repositories of models have this file too."""

_FOLDERS: Final = ("original", "onnx", "openvino", "coreml")
"""Folders in repositories of models, with the same weights for other software."""

_OF_THEIR_OWN: Final = re.compile(
    r"(checkpoint|step|epoch|iter)[-_=]?\w*\d+(\.ckpt)?|wandb|mlruns|runs|logs|lightning_logs"
)
"""Names of folders with other steps or logs, in the directory of a run."""

MOST_NAMED: Final = 8
"""Maximum number of files, and of tensors of a file, that a message names."""

_BEGIN_BYTES: Final = 16


def left_out_of(checkpoint: Checkpoint | CompositeCheckpoint, source: AnyLocation, context: Context) -> tuple[str, ...]:
    """Return the files with state, and tensors as ``file: tensors``, that are not part of a checkpoint.

    Checkpoints of ckptcore list all of their files, so the result is empty for them.
    """
    if checkpoint.root is not None or checkpoint.version.is_object:
        return ()
    read, tensors = files_read_by(checkpoint, source, context)
    suffixes = {key.rpartition(".")[2] for key in read}
    store = checkpoint.location.store
    files = [
        key
        for key in store.list()
        if key not in read and _has_state(key, suffixes, read) and (key.endswith(".json") or not _is_empty(store, key))
    ]
    return (*sorted(files), *tensors)


def files_read_by(
    checkpoint: Checkpoint | CompositeCheckpoint, source: AnyLocation, context: Context
) -> tuple[set[str], list[str]]:
    """Return the files of the checkpoint, and what a load leaves out of them.

    The second list has ``file: tensors``, or ``file`` if no index names the file.
    """
    trees: list[tuple[str, Checkpoint]] = []
    read: set[str] = set()
    tensors: list[str] = []
    if isinstance(checkpoint, Checkpoint):
        trees.append(("", checkpoint))
    else:
        present = present_members(checkpoint)
        read.update(*present.values())  # a checkpointable may be a file
        for directory, member in open_members(present, member_opener(checkpoint, source, context)):
            if isinstance(member, Checkpoint):  # the caller reports the others
                trees.append((f"{directory}/", member))
    for prefix, stored in trees:
        while stored.derived is not None:  # a derived tree does not have the stored arrays
            stored = stored.derived.sources[0]
        read.update(f"{prefix}{key}" for key in (*stored.objects, *stored.origin.files))
        read.update(f"{prefix}{key}" for _, key, _, _ in extents_of(stored))
        errors = [error for record in stored.tree.leaves if (error := unreadable_error(record))]
        read.update(f"{prefix}{error.key}" for error in errors if isinstance(error, CorruptCheckpointError))
        names = {str(path[-1]) for path in stored.tree.paths if path}
        for key, unused in stored.origin.unused.items():
            read.add(f"{prefix}{key}")
            if lost := [name for name in unused if name not in names]:
                more = f" and {len(lost) - MOST_NAMED} more" if len(lost) > MOST_NAMED else ""
                tensors.append(f"{prefix}{key}: {', '.join(lost[:MOST_NAMED])}{more}")
            elif not unused and not _is_empty(checkpoint.location.store, f"{prefix}{key}"):
                tensors.append(f"{prefix}{key}")  # no index names this file
    return read, tensors


def _has_state(key: str, read_suffixes: Collection[str], read: Collection[str]) -> bool:
    """Return True if an unread file has state of its own, which the files that a load reads do not have."""
    directory, _, name = key.rpartition("/")
    folders: Sequence[str] = directory.split("/") if directory else ()
    if not _STATE.fullmatch(name) or name == _ARGUMENTS or any(folder.startswith(".") for folder in folders):
        return False
    if folders and (folders[0] in _FOLDERS or _OF_THEIR_OWN.fullmatch(folders[0])):
        return False
    beside = {other.rpartition("/")[2] for other in read if other.rpartition("/")[0] == directory}
    suffix = name.rpartition(".")[2]
    if suffix in ("bin", "safetensors") and any(_stem(other) == _stem(name) for other in beside):
        return suffix in read_suffixes  # True for another shard, False for the same weights in another format
    if not beside or not OTHER_FORMATS.fullmatch(name):
        return True
    if suffix not in read_suffixes or name.startswith("consolidated"):
        return False
    # A variant such as model.fp16.safetensors has the same weights in another dtype. A shard has other weights.
    return not any(_stem(name).startswith(f"{_stem(other)}.") for other in beside)


def _is_empty(store: StorageBackend, key: str) -> bool:
    """Return True for a file that is empty, begins with text (such as a Git LFS pointer), or has no tensor."""
    size = store.size(key)
    if not size:
        return True
    begin = store.get(key, 0, min(size, _BEGIN_BYTES))
    if key.endswith(".safetensors") and size == 8 + int.from_bytes(begin[:8], "little"):  # it has only a header
        return True
    return begin.isascii() and begin.decode().replace("\n", " ").isprintable()


def _stem(name: str) -> str:
    return re.sub(r"-\d{5}-of-\d{5}", "", name.rpartition(".")[0])
