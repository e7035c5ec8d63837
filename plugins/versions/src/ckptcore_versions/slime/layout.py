"""The layout `slime`: the directories of versions that slime, miles, SGLang, vime and stitch share.

A full version is a Hugging Face checkpoint with an index. A delta has a zstd frame for each tensor that changed: see
`ckptcore_versions.slime.delta_index`. Both have files ``model-00001-00002.safetensors``: the number of the process, and
that of its file, from 1. Readers find them through the index.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np

from ckptcore.builtin.safetensors_files import encode_file
from ckptcore.errors import CheckpointError, InvalidLocationError, UnsupportedLeafError
from ckptcore.io.elements import copy_elements, is_little, little_dtype, plain
from ckptcore.io.threads import BackgroundThreads
from ckptcore.model.arrays import Box, HostArray
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.transfer import ArraySegment, BytesSegment, Receipt, Segment, WriteItem, WritePlan
from ckptcore.model.tree import JSON, format_path
from ckptcore.plain_safetensors import encode_header
from ckptcore.planning import ChunkTable
from ckptcore.protocols import (
    BaseReference,
    ChainedArrays,
    ChainLink,
    ChunkIndex,
    Inspection,
    Layout,
    LayoutCapabilities,
    ReadStore,
    Snapshot,
    WriteStore,
)
from ckptcore.step_names import StepNameFormat, StepNames
from ckptcore_versions.held_version import HeldVersion, VersionLayout
from ckptcore_versions.slime.chains import derive_arrays
from ckptcore_versions.slime.delta_index import FRAME_COLUMNS, INDEX, Delta, inspect_delta, stored_tensors
from ckptcore_versions.slime.frames import (
    MAX_OVERWRITE_BYTES,
    ChecksumFormat,
    EncodedTensor,
    Encoding,
    checksum,
    encode,
)
from ckptcore_versions.tensor_names import tensor_names

_THREADS: Final = min(8, os.cpu_count() or 1)
_FILE_BYTES: Final = 1 << 28
"""Bytes of frames after which a process starts another file. It keeps the frames of a file in memory."""

_MAX_FULL_BYTES: Final = 5_000_000_000
"""Maximum bytes of the elements in a file of a full version. A larger array has a separate file."""

_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".index.json")
"""Suffixes of files with weights, which are not assets."""


@dataclass(frozen=True, slots=True)
class SlimeLayout(VersionLayout):
    """Versions of weights that the readers of slime, miles, SGLang, vime and stitch follow. Writes full versions.

    `against` returns the layout that writes a delta. A process writes the arrays that it holds whole, because these
    readers need whole arrays. An array that no process holds whole is refused.

    Attributes:
        encoding: the encoding of deltas. ``"xor"`` is smaller. ``"overwrite"`` can be applied twice, and needs arrays
            of less than 4 GiB.
        checksum_format: the format of the checksum of each tensor of a delta. ``"blake3"`` needs the package blake3.
        assets: a local directory with a Hugging Face model. Its files other than weights, such as ``config.json`` and
            the tokenizer, are copied into each full version. An engine that pulls a full version deletes all other
            files of its copy, so without these it cannot load the model. Only the leader of a job needs the directory.
            None: copy nothing.

    Raises:
        ValueError: the encoding or the checksum is unknown.
    """

    encoding: Encoding = "xor"
    checksum_format: ChecksumFormat = "xxh3-128"
    assets: str | os.PathLike[str] | None = None
    _number: int | None = field(default=None, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        for name, value, known in (
            ("encoding", self.encoding, get_args(Encoding)),
            ("checksum_format", self.checksum_format, get_args(ChecksumFormat)),
        ):
            if value not in known:
                raise ValueError(f"SlimeLayout({name}={value!r}): expected one of {', '.join(map(repr, known))}")

    @property
    def name(self) -> str:
        """The name "slime"."""
        return "slime"

    @property
    def version_names(self) -> StepNames:
        """The names that readers of this format expect: ``weight_v000007``."""
        return StepNames(StepNameFormat("weight_v", width=6))

    def accepts_base(self, base: int, number: int) -> bool:
        """Return True for the version before, because readers apply every version between, one by one."""
        return base == number - 1

    def accepts_arrays(self, base: TreeMetadata, tree: TreeMetadata) -> bool:
        """Return True for the same tensors. A tied array has one name, so that ties must be the same, too."""
        return stored_tensors(base) == stored_tensors(tree)

    def numbered(self, number: int) -> SlimeLayout:
        """See `VersionLayout.numbered`. The index of a full version has the number if it is given."""
        return replace(self, _number=number)

    def against(self, held: HeldVersion | None) -> Layout:
        """See `VersionLayout.against`.

        Raises:
            ValueError: the base is not the version before.
        """
        if held is None:
            return self
        base = held.version.number
        if self._number is not None and not self.accepts_base(base, self._number):
            raise ValueError(
                f"version {self._number} cannot be a delta relative to version {base}: readers of "
                "slime's format follow versions one by one. Publish a full version"
            )
        return _DeltaLayout(self.encoding, self.checksum_format, None, _number=base + 1, held=held)

    # --- write

    def check(self, tree: TreeMetadata, size: int) -> None:
        """Refuse trees in which several arrays would get the same name.

        Raises:
            NameCollisionError
            MissingDistributionError: the package of the checksum is not installed.
        """
        tensor_names(tree)
        checksum(self.checksum_format, np.empty(0, np.uint8))

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Write the arrays of this process to files of safetensors.

        Raises:
            UnsupportedLeafError: an array is divided among processes.
            InvalidLocationError: the directory of the assets does not exist.
        """
        plan, items = snapshot.plan, _whole_items(snapshot.plan)
        if plan.rank == 0:
            self._check_assets()
        names = tensor_names(plan.tree)
        state: dict[str, list[Any]] = {"files": [], "leaf": [], "file": [], "offset": []}

        def objects() -> Iterator[tuple[str, Sequence[Segment]]]:
            for number, group in enumerate(_groups(plan, items)):
                leaves = [plan.items[item].leaf for item in group]
                head, starts = encode_file(
                    _metadata(plan.tree, names, leaves), [(names[leaf], _record(plan.tree, leaf)) for leaf in leaves]
                )
                state["files"].append(_file_name(plan.rank, number))
                state["leaf"].extend(leaves)
                state["file"].extend([number] * len(leaves))
                state["offset"].extend(starts)
                yield state["files"][-1], [BytesSegment(head), *[_segment(snapshot, item) for item in group]]

        store.write_many(objects())
        return state

    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        """Copy the assets, and then write the index, which publishes the version.

        Raises:
            InvalidLocationError: the directory of the assets does not exist.
        """
        state = _merged(receipts, ("files", "leaf", "file", "offset"))
        names = tensor_names(tree)
        metadata: dict[str, JSON] = {"total_size": tree.nbytes}
        if self._number is not None:
            metadata["version"] = f"{self._number:06d}"
        weight_map = {
            names[leaf]: state["files"][file] for leaf, file in zip(state["leaf"], state["file"], strict=True)
        }
        self._check_assets()  # they may have been deleted since `write`
        for path in [] if self.assets is None else sorted(Path(self.assets).iterdir()):
            if path.is_file() and not path.name.startswith((".", "checkpoint.")) and not path.name.endswith(_WEIGHTS):
                store.put(path.name, path.read_bytes())
        store.put(INDEX, json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2).encode())
        return dict(state)

    def _check_assets(self) -> None:
        if self.assets is not None and not Path(self.assets).is_dir():
            raise InvalidLocationError(
                f"SlimeLayout(assets={os.fspath(self.assets)!r}): there is no such directory. Give the directory of "
                "the model. The save is not committed"
            )

    # --- read

    def index(self, tree: TreeMetadata, state: JSON) -> ChunkIndex:
        """Return the table of arrays, or that of the frames of a delta."""
        delta = Delta.of_state(state)
        return ChunkTable(tree, state) if delta is None else _FrameTable(tree, delta.table)

    def base(self, tree: TreeMetadata, state: JSON) -> BaseReference | None:
        """Return the base of a delta."""
        delta = Delta.of_state(state)
        return None if delta is None else delta.reference

    def derive(self, links: Sequence[ChainLink], base: TreeMetadata) -> ChainedArrays:
        """Return the arrays after the changes of all deltas."""
        return derive_arrays(links, base)

    def inspect(self, store: ReadStore, entry: str | None) -> Inspection | None:
        """Inspect the directory of a delta. A full version is a checkpoint of the layout `safetensors`."""
        return None if entry is not None else inspect_delta(store)

    def own_keys(self, keys: Sequence[str], members: Collection[str]) -> Collection[str]:
        """Return the index and the files with frames."""
        return [key for key in keys if key == INDEX or key.endswith(".safetensors")]


@dataclass(frozen=True, slots=True)
class _DeltaLayout(SlimeLayout):
    """Writes a delta.

    Attributes:
        held: its base.
    """

    held: HeldVersion = field(kw_only=True)

    @property
    def capabilities(self) -> LayoutCapabilities:
        """A delta."""
        return LayoutCapabilities(differences=self.held.version.reference)

    def check(self, tree: TreeMetadata, size: int) -> None:
        """See `SlimeLayout.check`. Also refuse arrays with positions that do not fit into 32 bits.

        Raises:
            NameCollisionError, MissingDistributionError, UnsupportedLeafError
        """
        SlimeLayout.check(self, tree, size)
        for leaf, record in enumerate(tree.leaves):
            nbytes = record.spec.nbytes if isinstance(record, ArrayRecord) else 0
            if self.encoding == "overwrite" and nbytes >= MAX_OVERWRITE_BYTES:
                raise UnsupportedLeafError(
                    f"{format_path(tree.paths[leaf])} has {nbytes} bytes, and the encoding "
                    "'overwrite' has positions of 32 bits: pass SlimeLayout(encoding='xor')"
                )

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Encode the changes of the arrays of this process, and write them.

        Raises:
            UnsupportedLeafError: an array is divided among processes, or the base lacks it.
        """
        rank = snapshot.plan.rank
        state: dict[str, list[Any]] = {name: [] for name in FRAME_COLUMNS}

        def objects() -> Iterator[tuple[str, Sequence[Segment]]]:
            group: dict[str, EncodedTensor] = {}
            nbytes = 0
            for name, encoded in self._encoded(snapshot):
                group[name] = encoded
                nbytes += len(encoded.frame)
                if nbytes >= _FILE_BYTES:
                    yield file_of(group)
                    group, nbytes = {}, 0
            if group:
                yield file_of(group)

        def file_of(group: Mapping[str, EncodedTensor]) -> tuple[str, Sequence[Segment]]:
            tensors = {name: ("U8", (len(encoded.frame),)) for name, encoded in group.items()}
            head, names = encode_header(tensors, {name: encoded.checksum for name, encoded in group.items()})
            number, offset = len(state["files"]), len(head)
            state["files"].append(_file_name(rank, number))
            for name in names:
                state["names"].append(name)
                state["file"].append(number)
                state["offset"].append(offset)
                state["nbytes"].append(len(group[name].frame))
                state["checksums"].append(group[name].checksum)
                offset += len(group[name].frame)
            return state["files"][-1], [BytesSegment(head), *[BytesSegment(group[name].frame) for name in names]]

        store.write_many(objects())
        return {**state, "base": list(self.held.version)}

    def _encoded(self, snapshot: Snapshot) -> Iterator[tuple[str, EncodedTensor]]:
        """Yield the arrays that changed, in order."""
        plan = snapshot.plan
        names = tensor_names(plan.tree)
        pending: deque[tuple[str, Future[EncodedTensor | None]]] = deque()
        threads = BackgroundThreads(_THREADS, "ckptcore-frames")
        try:
            for number in _whole_items(plan):
                while len(pending) > 2 * _THREADS:
                    yield from _changed(*pending.popleft())
                encoding = threads.submit(partial(self._encode, snapshot, number))
                pending.append((names[plan.items[number].leaf], encoding))
            while pending:
                yield from _changed(*pending.popleft())
        finally:
            threads.join(cancel=True)

    def _encode(self, snapshot: Snapshot, number: int) -> EncodedTensor | None:
        item = snapshot.plan.items[number]
        try:
            if not item.spec.size:
                return None
            path = snapshot.plan.tree.paths[item.leaf]
            whole = Box.whole(item.spec.shape)
            old = self.held.elements(path, item.spec, whole)
            if old is None:
                raise UnsupportedLeafError(
                    f"{format_path(path)} ({item.spec}) is not in {self.held.version.name}, or has another shape or "
                    "dtype there, and a delta of slime's format only changes arrays: publish a full version (full=True)"
                )
            new = _bytes_of(item, item.boxes, snapshot.take(number))
            return encode(_bytes_of(item, [whole], [old]), new, self.encoding, self.checksum_format)
        finally:
            snapshot.release(number)

    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        """Write the index, which publishes the version.

        Raises:
            CheckpointError: processes held different versions.
        """
        version = self.held.version
        for receipt in receipts:
            state: Any = receipt.state
            if list(state["base"]) != list(version):
                raise CheckpointError(
                    f"process {receipt.rank} wrote a delta relative to {state['base'][0]!r}, and process 0 to "
                    f"{version.name!r}: every process must hold the same version. The save is not committed"
                )
        delta = Delta(
            version.number + 1,
            version.number,
            self.encoding,
            self.checksum_format,
            version.reference,
            **_merged(receipts, FRAME_COLUMNS),
        )
        store.put(INDEX, delta.index_json())
        return delta.to_state()


class _FrameTable(ChunkTable):
    """The table of the frames of a delta."""

    def unverified(self, leaf: int, store: ReadStore) -> Collection[str]:
        """Return no objects: a damaged frame does not give the elements of the recorded checksum."""
        return ()


def _file_name(rank: int, number: int) -> str:
    return f"model-{rank + 1:05d}-{number + 1:05d}.safetensors"


def _record(tree: TreeMetadata, leaf: int) -> ArrayRecord:
    record = tree.leaves[leaf]
    assert isinstance(record, ArrayRecord)  # plans have no other items
    return record


def _whole_items(plan: WritePlan) -> range:
    """Return the numbers of the items of a plan, which are whole arrays.

    Raises:
        UnsupportedLeafError: an array is divided among processes.
    """
    for item in plan.items:
        if sum([box.size for box in item.boxes]) != item.spec.size:
            raise UnsupportedLeafError(
                f"{format_path(plan.tree.paths[item.leaf])} ({item.spec}) is divided among processes, and readers of "
                "slime's format need whole arrays: publish with the layout 'deltas', or gather the array on one process"
            )
    return range(len(plan.items))


def _groups(plan: WritePlan, items: Sequence[int]) -> list[list[int]]:
    """Divide items into files. Wide elements come first, so that every element is aligned to its size."""
    groups: list[list[int]] = []
    room = 0
    for number in sorted(items, key=lambda number: -plan.items[number].spec.numpy_dtype.itemsize):
        nbytes = plan.items[number].spec.nbytes
        if not groups or nbytes > room:
            groups.append([])
            room = _MAX_FULL_BYTES
        groups[-1].append(number)
        room -= nbytes
    return groups


def _metadata(tree: TreeMetadata, names: Mapping[int, str], leaves: Collection[int]) -> dict[str, JSON]:
    """Return the metadata of a file of a full version: the other names of its arrays, as safetensors.torch has them."""
    here = set(leaves)
    aliases: dict[str, JSON] = {names[alias]: names[target] for alias, target in tree.aliases.items() if target in here}
    return {**aliases, "format": "pt"}


def _segment(snapshot: Snapshot, number: int) -> ArraySegment:
    item = snapshot.plan.items[number]

    def boxes_with_arrays() -> Sequence[tuple[Box, HostArray]]:
        return list(zip(item.boxes, snapshot.take(number), strict=True))

    return ArraySegment(
        Box.whole(item.spec.shape), item.spec.numpy_dtype.itemsize, boxes_with_arrays, partial(snapshot.release, number)
    )


def _bytes_of(item: WriteItem, boxes: Sequence[Box], arrays: Sequence[HostArray]) -> HostArray:
    """Return the elements of a whole array as bytes: uint8 with one axis, little endian, in C order."""
    if len(arrays) == 1 and arrays[0].flags.c_contiguous and is_little(arrays[0].dtype):
        return plain(arrays[0]).reshape(-1).view(np.uint8)
    whole: HostArray = np.empty(item.spec.shape, little_dtype(item.spec.numpy_dtype))
    for box, array in zip(boxes, arrays, strict=True):
        copy_elements(whole[box.slices], array)
    return whole.reshape(-1).view(np.uint8)


def _changed(name: str, encoding: Future[EncodedTensor | None]) -> Iterator[tuple[str, EncodedTensor]]:
    encoded = encoding.result()
    if encoded is not None:
        yield name, encoded


def _merged(receipts: Sequence[Receipt], columns: Sequence[str]) -> dict[str, list[Any]]:
    """Join the columns of all processes. Numbers of files become numbers in the joined list of files."""
    merged: dict[str, list[Any]] = {name: [] for name in columns}
    for receipt in receipts:
        state: Any = receipt.state
        first = len(merged["files"])
        for name in columns:
            merged[name].extend([first + file for file in state["file"]] if name == "file" else state[name])
    return merged
