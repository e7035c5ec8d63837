"""Step directories of training programs, with several torch.distributed.checkpoint directories.

Some training programs (such as xorl) save ``step_100/model``, ``step_100/optimizer`` and the state
of each process in ``step_100/extra_state/extra_state_rank_0.pt``. In addition to the directories of
torch.distributed.checkpoint, two kinds of entries become members: subdirectories with safetensors
or torch.save files, and torch.save files. Everything else (tokenizers, logs) is ignored. Only names
and the first bytes of files are read.

Two other kinds of directories have the same structure. A directory of several steps is recognised by the step names of
its subdirectories. A folder of unrelated checkpoints has no typical names. So a directory is one checkpoint only if a
subdirectory has the name of a part of a training state, such as ``model``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import ckptcore
from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError, UncommittedCheckpointError
from ckptcore.protocols import InspectedComposite, MemberKind, ReadStore

WRITER: Final = "torch.distributed.checkpoint"

_METADATA: Final = ".metadata"
_OF_RANK: Final = re.compile(r"__(0|[1-9][0-9]{0,8})\.metadata", re.ASCII)
_FILE: Final = re.compile(r"__([0-9]{1,9})_[0-9]+\.distcp", re.ASCII)
_COMMON: Final = "common.pt"
"""The file that Megatron writes next to ``.metadata``, with ``metadata.json``. See `with_common`."""
_OWN: Final = re.compile(r"\.metadata|__[0-9]+\.metadata|[^/]+\.distcp", re.ASCII)
"""The names of files that torch.distributed.checkpoint writes."""
_OWN_SAFETENSORS: Final = re.compile(r"(shard|model|diffusion)[^/]*\.safetensors(\.index\.json)?", re.ASCII)
"""Names of safetensors files that ``HuggingFaceStorageWriter`` of torch.distributed.checkpoint writes."""
_PART: Final = re.compile(
    r"(pytorch_)?(models?|modules?|weights|params|parameters|optim|opt|optimizers?|schedulers?|([a-z]+_)?states?|ema|actor"
    r"|critic|policy|generator|discriminator|unet|transformer|text_encoder|vae)((_fsdp)?_[0-9]+)?"
)
"""Names of the parts of a training state."""
_TORCH: Final = (".pt", ".pth", ".bin")
_SAFETENSORS: Final = ".safetensors"
RANK_FILE: Final = re.compile(
    r"(?P<kind>.*?)_?(?:world_size_(?P<size>[1-9][0-9]{0,8})_)?rank[_-]?(?P<rank>0|[1-9][0-9]{0,8})"
    r"(?P<end>\D*\.(?:pt|pth|bin))",
    re.ASCII,
)
"""Names of the files of one process, such as ``model_world_size_4_rank_0.pt``."""
_MAX_NAMES: Final = 256
"""Maximum number of entries of a step directory. Subdirectories of larger directories are not listed."""
_ZIP: Final = b"PK\x03\x04"
_PICKLE: Final = b"\x80"


def missing_metadata(names: Sequence[str]) -> str | None:
    """Return the first missing metadata file if each rank has its own; None if no file is known to be missing.

    Each process writes a metadata file, and ranks have no gaps. If the last rank lacks both its metadata and its data
    file, this is not detected.
    """
    ranks = {int(match[1]) for name in names if (match := _OF_RANK.fullmatch(name))}
    if not ranks or _METADATA in names:
        return None
    last = max(ranks)
    writers = {int(match[1]) for name in names if (match := _FILE.fullmatch(name))}
    absent = next((rank for rank in range(last) if rank not in ranks), min(writers - ranks, default=None))
    return None if absent is None else f"__{absent}.metadata"


def find_dcp_files(names: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the metadata files in a directory, ordered by rank, and the data files."""
    files = [name for name in names if _FILE.fullmatch(name)]
    if _METADATA in names:
        return [_METADATA], files
    ranks = [(int(match[1]), name) for name in names if (match := _OF_RANK.fullmatch(name))]
    return [name for _, name in sorted(ranks)], files


def dcp_files(keys: Sequence[str], members: Collection[str]) -> Collection[str]:
    """Return the keys of files of torch.distributed.checkpoint, and of the members of a step directory.

    Args:
        keys: the keys of all files in the directory of a checkpoint.
        members: the names of its checkpointables: subdirectories and files.
    """
    own = [key for key in keys if _OWN.fullmatch(key)]
    if _COMMON in keys and _METADATA in own:
        own += [key for key in keys if key in (_COMMON, "metadata.json")]
    if not any(key.endswith(".distcp") for key in own):
        own += [key for key in keys if _OWN_SAFETENSORS.fullmatch(key)]
    for key in keys:
        top, _, inside = key.partition("/")
        name = inside.rpartition("/")[2]
        if top in members and (not inside or _OWN.fullmatch(name) or name.endswith((*_TORCH, _SAFETENSORS))):
            own.append(key)
    return own


def unfinished(store: ReadStore, directory: str, file: str) -> UncommittedCheckpointError:
    """Return the error for a directory with data files but without metadata. `directory` ends in ``/`` or is empty."""
    within = f"{store.address.url.rstrip('/')}/{directory}" if store.address is not None else directory
    return UncommittedCheckpointError(
        f"{within}{file} is a data file of torch.distributed.checkpoint, but {within}{_METADATA}, which describes it, "
        "is missing: the save failed or is still running. Load another step"
    )


def inspect_step_directory(store: ReadStore) -> InspectedComposite | None:
    """Inspect a step directory that contains torch.distributed.checkpoint directories.

    Returns None for a checkpoint and for a directory of steps.

    Raises:
        UncommittedCheckpointError: one of the checkpoints is incomplete.
    """
    names = store.list_names("")
    directories = [name[:-1] for name in names if name.endswith("/") and not name.startswith(".")]
    if not directories or len(names) > _MAX_NAMES or any(find_dcp_files(names)):
        return None
    steps = ckptcore.step_names.StepNames()
    if any(steps.parse(name) is not None for name in directories):
        return None
    members: dict[str, MemberKind] = {}
    checkpoints: list[str] = []
    for name in directories:
        inside = store.list_names(f"{name}/")
        metadata_keys, files = find_dcp_files(inside)
        if files and not metadata_keys:
            raise unfinished(store, f"{name}/", files[0])
        if metadata_keys:
            checkpoints.append(name)
        if metadata_keys or any(file.endswith((*_TORCH, _SAFETENSORS)) for file in inside):
            members[name] = "tree"
    if not any(_PART.fullmatch(name) for name in checkpoints):
        return None
    for name in names:
        if name.endswith(_TORCH) and is_torch_file(store, name):
            members[name] = "tree"
    return InspectedComposite(members, WRITER)


def is_torch_file(store: ReadStore, key: str) -> bool:
    """Return whether a file begins like one written by torch.save."""
    try:
        head = store.get(key, 0, len(_ZIP))
    except ObjectNotFoundError:
        return False
    return head == _ZIP or head[:1] == _PICKLE


def find_rank_files(names: Sequence[str]) -> Sequence[str] | None:
    """Return the names ordered by rank if the directory contains nothing but one file per process, else None.

    Raises:
        CorruptCheckpointError: the file of a process is missing.
    """
    matches = [match for name in names if (match := RANK_FILE.fullmatch(name))]
    if not matches or len(matches) != len(names) or len({match.group("kind", "size", "end") for match in matches}) != 1:
        return None
    by_rank: Mapping[int, str] = {int(match["rank"]): match[0] for match in matches}
    last = max(by_rank)
    if len(by_rank) <= last:
        absent = next(rank for rank in range(last) if rank not in by_rank)
        raise CorruptCheckpointError(
            f"the file of rank {absent} is missing, but rank {last} has one ({by_rank[last]}); load single files by "
            "their own location, or load another step",
            key=by_rank[last],
        )
    return [by_rank[rank] for rank in sorted(by_rank)]
