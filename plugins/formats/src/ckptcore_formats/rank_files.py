"""The layout `ranks`: one torch.save file for each process, with parts of DTensors or ShardedTensors. Read-only.

verl writes ``model_world_size_4_rank_0.pt``, ``optim_...`` and ``extra_state_...``. FSDP with local or
sharded state dicts writes names such as ``pytorch_model_fsdp_rank0.bin``, as do programs that save
``model.state_dict()`` on every process. Files of one kind are merged into one tree. If there are several
kinds, the tree is a dict by the name of the kind. A kind without parts of tensors, such as
``extra_state``, is a dict with the state of each rank.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ckptcore_dcp.reading import RANK_FILE, Column, Leaf, StoredTensor, TensorPart, Unreadable

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import Box, Key, Node, Skeleton
from ckptcore.protocols import Inspection, ReadStore
from ckptcore_formats.assembly import (
    RESTORE,
    AssembledLayout,
    Branch,
    Divided,
    Entry,
    Part,
    PartReader,
    Piece,
    Refused,
    has_weights,
    inspection_of,
    pieces_of_part,
)


class _Kind(NamedTuple):
    """The names of the files of one kind, with the rank left out.

    Attributes:
        name: the name of the kind.
        size: the number of processes, if the names contain it.
        end: the rest of the names.
    """

    name: str
    size: str | None
    end: str


class RankFilesLayout(AssembledLayout):
    """Directories with one torch.save file for each process. Read-only."""

    name = "ranks"

    def inspect(self, store: ReadStore, entry: str | None) -> Inspection | None:
        """Recognise a directory of files with a rank in their names.

        The names must also contain the world size, or the files must contain parts of tensors.

        Raises:
            CorruptCheckpointError: the file of a rank is missing, or there are files of several jobs.
        """
        if entry is not None:
            return None
        names = store.list_names("")
        kinds = _kinds_of(names)
        if not kinds:
            return None
        reader = PartReader(store)
        if has_weights({*names}.difference(*[files.values() for files in kinds.values()])):
            return None  # the weights are in other files, which another layout reads
        first: dict[_Kind, Part] = {}
        for kind, files in kinds.items():
            part = reader.find(files[min(files)])
            if part is None:
                return None
            first[kind] = part
        if not any(kind.size or part.processes for kind, part in first.items()):
            return None
        _expect_one_job(kinds)
        trees: dict[Key, Entry] = {}
        for kind, files in kinds.items():
            _, *others = _complete(kind, files, first[kind])
            trees[kind.name] = _merge_ranks([first[kind], *[reader.read(key) for key in others]])
        tree = next(iter(trees.values())) if len(trees) == 1 else trees
        return inspection_of(tree, "torch.save of each process", {*reader.keys})

    def own_keys(self, keys: Sequence[str], members: Collection[str]) -> Collection[str]:
        """Return the files of ranks."""
        return [key for key in keys if RANK_FILE.fullmatch(key) and "/" not in key]


def _kinds_of(names: Sequence[str]) -> Mapping[_Kind, Mapping[int, str]]:
    """Return the files of each kind by rank."""
    kinds: dict[_Kind, dict[int, str]] = {}
    for name in names:
        if match := RANK_FILE.fullmatch(name):
            label = f"{match['kind'].rstrip('_-.')}{match['end'].rpartition('.')[0]}".strip("_-.")
            kind = _Kind(label or "rank", match["size"], match["end"])
            kinds.setdefault(kind, {})[int(match["rank"])] = name
    return kinds


def _expect_one_job(kinds: Mapping[_Kind, Mapping[int, str]]) -> None:
    """Check that the files of each kind are from one job: their names differ only by the rank.

    Raises:
        CorruptCheckpointError: the files are from several jobs.
    """
    first: dict[str, _Kind] = {}
    for kind, files in kinds.items():
        other = first.setdefault(kind.name, kind)
        if other != kind:
            examples = f"{kinds[other][min(kinds[other])]} and {files[min(files)]}"
            raise CorruptCheckpointError(
                f"the directory has files of several jobs, such as {examples}: move those of each job to a directory "
                "of their own, or load one file by its own path"
            )


def _complete(kind: _Kind, files: Mapping[int, str], first: Part) -> Sequence[str]:
    """Return the files of a kind in the order of their ranks.

    Raises:
        CorruptCheckpointError: there are fewer files than processes. Their number is in the file names or in the first
            file.
    """
    expected = max(int(kind.size or 0), first.processes, max(files) + 1)
    if expected > len(files):
        rank = next(rank for rank in range(len(files) + 1) if rank not in files)
        known = files[min(files)]
        missing = re.sub(rf"{min(files)}(\D*)$", rf"{rank}\1", known)
        raise CorruptCheckpointError(
            f"{missing} is missing: {known} was saved by {expected} processes, of which {len(files)} have a file; "
            f"{RESTORE}, or load the file of one rank by its own path",
            key=missing,
        )
    return [files[rank] for rank in range(expected)]


def _merge_ranks(parts: Sequence[Part]) -> Entry:
    """Merge the trees of all processes."""
    if not any(part.processes for part in parts):
        return parts[0] if len(parts) == 1 else dict(enumerate(parts))
    return merge_parts(parts)


def merge_parts(parts: Sequence[Part]) -> Entry:
    """Merge the trees of all processes, in the order of ranks. Parts that differ cannot be loaded."""
    skeleton = parts[0].skeleton
    if all(part.skeleton == skeleton for part in parts):
        leaves = zip(*[part.leaves for part in parts], strict=True)
        return Branch(skeleton, [_merge_leaf(entry, parts) for entry in leaves])
    if not all(_is_mapping(part.skeleton) for part in parts):
        return Refused(
            UnsupportedLeafError(
                "it is stored differently by the processes: load the file of one rank by its own path, or save it in a "
                "file of its own"
            )
        )
    children: dict[Key, list[Part]] = {}
    for part in parts:
        for key, child in part.items():
            children.setdefault(key, []).append(child)
    return {key: merge_parts(entry) for key, entry in children.items()}


def _is_mapping(skeleton: Skeleton) -> bool:
    return isinstance(skeleton, Node) and skeleton.kind in ("dict", "OrderedDict")


def _merge_leaf(leaves: Sequence[Leaf], parts: Sequence[Part]) -> Entry:
    """Return one leaf for the leaves of all processes at one path."""
    first = leaves[0]
    for leaf in leaves:
        if isinstance(leaf, Unreadable):
            return Refused(UnsupportedLeafError(f"it is {leaf.reason}"))
    if any(isinstance(leaf, TensorPart) for leaf in leaves):
        try:
            return _united(leaves, parts)
        except (CorruptCheckpointError, UnsupportedLeafError) as error:
            return Refused(error)
    if isinstance(first, StoredTensor):
        contents = {_content(leaf, part) for leaf, part in zip(leaves, parts, strict=True)}
        same = len(contents) == 1 and None not in contents
    else:
        same = all(_is_same(first, leaf) for leaf in leaves)
    if same:
        return parts[0].of_leaf(first)
    return Refused(
        UnsupportedLeafError(
            "it differs between the processes, or has no checksum by which to compare it, and is not divided between "
            "them: load the file of one rank by its own path"
        )
    )


def _content(leaf: Leaf, part: Part) -> tuple[object, ...] | None:
    """Return a key that is equal for tensors with equal content; None if their storage has no CRC-32."""
    if not isinstance(leaf, StoredTensor) or leaf.storage not in part.storages:
        return None
    storage = part.storages[leaf.storage]
    if not storage.crc and storage.size:
        return None
    return leaf.spec, leaf.kind, leaf.strides, leaf.offset, storage.crc, storage.size


def _is_same(first: Leaf, second: Leaf) -> bool:
    if isinstance(first, Column) and isinstance(second, Column):
        return repr(first.values) == repr(second.values)
    return type(first) is type(second) and repr(first) == repr(second)


def _checksums_differ(first: Piece, second: Piece) -> bool:
    """Return True if two pieces are whole storages, and their checksums differ."""
    storages = first.storage, second.storage
    whole = all(
        storage.crc and piece.offset == storage.start for storage, piece in zip(storages, (first, second), strict=True)
    )
    return whole and first.storage.size == second.storage.size and first.storage.crc != second.storage.crc


def _united(leaves: Sequence[Leaf], parts: Sequence[Part]) -> Divided:
    """Return a tensor from its parts. A box that several processes have is taken from the lowest rank.

    Raises:
        CorruptCheckpointError: the processes saved different tensors, or one of them saved another value instead.
        UnsupportedLeafError: two processes saved different elements of one box.
    """
    pieces: dict[Box, Piece] = {}
    described = next(leaf for leaf in leaves if isinstance(leaf, TensorPart))
    for leaf, part in zip(leaves, parts, strict=True):
        if isinstance(leaf, StoredTensor):  # one process has all elements, and the others none
            leaf = TensorPart(leaf.spec, leaf.kind, (Box.whole(leaf.shape),), (leaf,), 1)
        if not isinstance(leaf, TensorPart) or (leaf.spec, leaf.kind) != (described.spec, described.kind):
            description = leaf.spec if isinstance(leaf, TensorPart) else type(leaf).__name__
            raise CorruptCheckpointError(
                f"it is a part of {described.spec} in one file, and {description} in {part.key}: {RESTORE}",
                key=part.key,
            )
        for piece in pieces_of_part(leaf, part.storages, path="it"):
            other = pieces.setdefault(piece.box, piece)
            if other is not piece and _checksums_differ(other, piece):
                raise UnsupportedLeafError(
                    f"{other.storage.key} and {part.key} have different elements of one box of it, as replicas that "
                    "differ, or stages of a pipeline with one name: load the file of one rank by its own path"
                )
    return Divided(described.spec, described.kind, [*pieces.values()])
