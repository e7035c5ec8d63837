"""Writer of checkpoints for the save functions of torch.distributed.checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import os
import pickle
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, Final, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from ckptcore_dcp.layouts import DcpLayout
from ckptcore_torch.store_coordinator import StoreCoordinator
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

import ckptcore
from ckptcore.errors import CheckpointExistsError, RankFailedError
from ckptcore.model import Box
from ckptcore.protocols import Coordinator
from ckptcore_integrations.own_options import own_options
from ckptcore_integrations.torch_dcp.names import Steps, dtype_name, host_array, tree_of

CUSTOM: Final = "torch_dcp"
"""Key of the custom metadata of a checkpoint.

The metadata has the ids of the save (``checkpoint_id``, ``save_id``). Its ``items`` are the names of the values that
are stored as torch.save files.
"""

_VERSION: Final = "1.0.0"
_PLAIN: Final = frozenset((type(None), bool, int, float, complex, str, bytes))

T = TypeVar("T")


@own_options()
class Writer(StorageWriter):
    """Writes checkpoints with ckptcore, for ``torch.distributed.checkpoint.save(state, storage_writer=Writer(path))``.

    The checkpoint is committed atomically: all ranks write, and the first rank commits if none failed. The planner
    decides what each rank writes. Both `torch.distributed.checkpoint.load` and `ckptcore.load` read the files.
    `ckptcore.load` also verifies checksums, and returns the nested structure of the state.

    The `Metadata` that a save returns has no ``storage_data``. Only the file ``.metadata`` has it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = True,
        context: ckptcore.Context | None = None,
    ) -> None:
        """Prepare to save. Writes nothing yet.

        Args:
            path: a path or URL; the checkpoint is a directory there.
            overwrite: True to replace an existing checkpoint, atomically on file systems. Other files in its directory
                stay.
            context: options of ckptcore. For a process group with only some of the job's processes, the
                save uses another coordinator.
        """
        self.path = path
        self.overwrite = overwrite
        self.save_id = str(uuid.uuid4())
        self._context = context

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The location of the checkpoint."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True. Unsupported locations raise an error later, in the save."""
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another save. If `checkpoint_id` is given, it becomes the location."""
        if checkpoint_id:
            self.path = checkpoint_id
        self.save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse a save without communication.

        Raises:
            ValueError: the save has ``use_collectives=False``.
        """
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "use_collectives=False: ranks that do not communicate cannot commit a checkpoint together. Remove the "
                "argument, or pass storage_writer=torch.distributed.checkpoint.FileSystemWriter(path)"
            )

    def storage_meta(self) -> StorageMeta:
        """Return the location and the id of the save, as ``.metadata`` has them."""
        return StorageMeta(checkpoint_id=os.fspath(self.path), save_id=self.save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add the rank of this process in the job to its plan."""
        return dataclasses.replace(plan, storage_data=dist.get_rank() if _in_job() else 0)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Add the ranks of all processes of the save to each plan.

        Raises:
            RuntimeError: a planner removed the ranks, and the processes are not the whole job.
        """
        ranks = tuple([plan.storage_data for plan in plans])
        if None in ranks:  # the planner cached plans without ranks
            size = dist.get_world_size() if _in_job() else 1
            if size != len(plans):
                raise RuntimeError(
                    f"the planner's plans lack the ranks of {len(plans)} of {size} processes: keep "
                    "SavePlan.storage_data, or save without the cache of plans"
                )
            ranks = tuple(range(size))
        return [dataclasses.replace(plan, storage_data=ranks) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save the items of all ranks together, and return once the checkpoint is committed.

        Raises:
            RankFailedError: another rank failed.
            RuntimeError: there is a checkpoint, and `overwrite` is False.
        """
        context, exchange = _join(plan.storage_data, self._context or _default_context())
        own = exchange.attempt(lambda: [_Part.of(item, plan, planner) for item in plan.items])
        merged = exchange.union([part.described() for part in own])
        shards: dict[str, list[ckptcore.ArrayShard]] = {}
        for part in own:
            if part.shard is not None:
                shards.setdefault(part.name, []).append(part.shard)
        leaves = {name: part.leaf(shards.get(name, ())) for name, part in merged.items()}
        items = sorted([name for name, part in merged.items() if part.is_item])
        location = os.fspath(self.path)
        layout = DcpLayout(checkpoint_id=location, save_id=self.save_id, items=frozenset(items))
        try:
            ckptcore.save(
                f"{location.rstrip('/')}/",  # the slash marks a directory, whatever its name
                tree_of(leaves, {name: part.steps for name, part in merged.items()}),
                layout=layout,
                overwrite="keep-other-files" if self.overwrite else False,
                metadata={CUSTOM: {"checkpoint_id": location, "save_id": self.save_id, "items": items}},
                context=context,
            )
        except CheckpointExistsError as error:
            if self.overwrite:
                raise
            raise RuntimeError(f"Checkpoint already exists and self.overwrite=False: {error}") from error
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the metadata that the save returns. The file was already written by `write_data`."""
        metadata.version = _VERSION
        metadata.storage_meta = self.storage_meta()


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """An item of a plan: a box of an array, or a value.

    Attributes:
        name: the name of the entry.
        steps: the keys that lead to it; empty if unknown.
        spec: shape and dtype of an array; None for a value.
        shard: the box and its elements, on the rank that writes it.
        value: the value.
        is_item: True if the value is the bytes of a file of torch.save.
    """

    name: str
    steps: Steps = ()
    spec: tuple[tuple[int, ...], str] | None = None
    shard: ckptcore.ArrayShard | None = None
    value: Any = None
    is_item: bool = False

    @classmethod
    def of(cls, item: WriteItem, plan: SavePlan, planner: SavePlanner) -> _Part:
        """Resolve an item with the planner."""
        name, data = item.index.fqn, planner.resolve_data(item)
        known = plan.planner_data.get(name, ()) if isinstance(plan.planner_data, dict) else ()
        if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
            assert isinstance(data, io.BytesIO)  # the contract of `resolve_data`
            saved = data.getvalue()
            value = torch.load(io.BytesIO(saved), weights_only=False)  # bytes that this process has just written
            plain = _is_plain(value)
            return cls(name, known, value=value if plain else saved, is_item=not plain)
        assert isinstance(data, torch.Tensor)
        elements = host_array(data)
        start = tuple(item.tensor_data.chunk.offsets)
        stop = tuple([first + extent for first, extent in zip(start, elements.shape, strict=True)])
        spec = tuple(item.tensor_data.size), dtype_name(data.dtype)
        return cls(name, known, spec, ckptcore.ArrayShard(Box(start, stop), elements))

    def described(self) -> _Part:
        """Return the part without elements."""
        return dataclasses.replace(self, shard=None)

    def leaf(self, shards: Iterable[ckptcore.ArrayShard]) -> Any:
        """Return the leaf to save: the value, or the array with the boxes of this process."""
        return self.value if self.spec is None else ckptcore.ShardedArray(*self.spec, tuple(shards))


def _is_plain(value: Any) -> bool:
    """Return True if a value loads unchanged: a number, text, or a list or tuple of such values."""
    return type(value) in _PLAIN or (type(value) in (list, tuple) and all(map(_is_plain, value)))


class _Failure(NamedTuple):
    """The error of a rank, as text."""

    rank: int
    text: str


class _Exchange:
    """The exchange of the parts that each rank of a save writes.

    The payloads are pickles, like those of torch. This is safe, because they come from processes of the same job.
    """

    def __init__(self, coordinator: Coordinator, key: str) -> None:
        self._coordinator = coordinator
        self._key = key
        self._error: BaseException | None = None

    def attempt(self, work: Callable[[], list[T]]) -> list[T]:
        """Do the work of this rank. If it fails, `union` raises the error after the other ranks have received it."""
        try:
            return work()
        except BaseException as error:  # noqa: BLE001  # raised by `union`
            self._error = error
            return []

    def union(self, parts: list[_Part]) -> dict[str, _Part]:
        """Return the parts of all ranks by name.

        Raises:
            RankFailedError: another rank failed. A rank raises its own error unchanged.
        """
        job, error = self._coordinator, self._error
        own = parts if error is None else _Failure(job.rank, f"{type(error).__name__}: {error}")
        gathered = job.gather(f"{self._key}/parts", pickle.dumps(own))
        message = None if gathered is None else pickle.dumps(_merge([pickle.loads(data) for data in gathered]))
        merged = pickle.loads(job.broadcast(f"{self._key}/union", message))
        if error is not None:
            raise error
        if isinstance(merged, _Failure):
            raise RankFailedError(f"rank {merged.rank} failed: {merged.text}. Nothing was written")
        return dict(merged)


def _merge(gathered: list[list[_Part] | _Failure]) -> dict[str, _Part] | _Failure:
    """Merge the parts of all ranks. Arrays can have parts on several ranks."""
    merged: dict[str, _Part] = {}
    for rank, parts in enumerate(gathered):
        if isinstance(parts, _Failure):
            return parts
        for part in parts:
            first = merged.setdefault(part.name, part)
            if first.spec != part.spec:
                return _Failure(
                    rank,
                    f"{part.name!r} is {part.spec}, but {first.spec} on another rank. Give it one shape and dtype on "
                    "all",
                )
    return merged


def _in_job() -> bool:
    return dist.is_available() and dist.is_initialized()


@functools.cache
def _default_context() -> ckptcore.Context:
    return ckptcore.Context()


def _join(ranks: tuple[int, ...], context: ckptcore.Context) -> tuple[ckptcore.Context, _Exchange]:
    """Return the Context of a save by some ranks of the job, and their exchange."""
    world = dist.get_world_size() if _in_job() else 1
    everyone = ranks == tuple(range(world))
    if len(ranks) == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]  # exported only at run time
        coordinator: Coordinator = StoreCoordinator(store, 0, 1)
        key = ""
    else:
        coordinator, key = _groups().join(ranks, everyone=everyone)
    if everyone:
        coordinator = context.job.coordinator or coordinator
    else:
        context = dataclasses.replace(context, job=dataclasses.replace(context.job, coordinator=coordinator))
    return context, _Exchange(coordinator, key)


class _Group:
    """Some ranks of a job that save together, and the number of their saves."""

    def __init__(self, ranks: tuple[int, ...], *, everyone: bool) -> None:
        self.saves = 0
        if everyone:
            self.coordinator = StoreCoordinator.of_job()
            return
        # A separate store, because the other ranks of the job may never take part in an exchange.
        name = f"torch_dcp/{hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()}"
        world: Any = dist.group.WORLD
        store = dist.PrefixStore(name, world.get_group_store())  # type: ignore[attr-defined]  # exported at run time
        self.coordinator = StoreCoordinator(store, ranks.index(dist.get_rank()), len(ranks))


class _Groups:
    """The groups of ranks with which this process has saved. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_job: MutableMapping[Any, dict[tuple[int, ...], _Group]] = weakref.WeakKeyDictionary()

    def join(self, ranks: tuple[int, ...], *, everyone: bool) -> tuple[StoreCoordinator, str]:
        """Return the coordinator of some ranks, and the key of their next save.

        The key is equal on all of these ranks.
        """
        with self._lock:
            groups = self._by_job.setdefault(dist.group.WORLD, {})
            if ranks not in groups:
                groups[ranks] = _Group(ranks, everyone=everyone)
            group = groups[ranks]
            group.saves += 1
            return group.coordinator, f"torch_dcp/{group.saves}"


@functools.cache
def _groups() -> _Groups:
    return _Groups()
