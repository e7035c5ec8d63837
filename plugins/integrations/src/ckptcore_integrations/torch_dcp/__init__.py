"""Replacement for `torch.distributed.checkpoint` that saves and loads with ckptcore.

`save`, `async_save` and `load` have the arguments and results of the replaced functions. The replaced functions still
plan, stage and exchange. The checkpoints are written by `Writer` and read by `Reader`, which the original functions
accept as well. All other names are those of `torch.distributed.checkpoint`, submodules included.

::

    writer  a StorageWriter that saves the items of a plan as a tree, in the layout dcp
    reader  a StorageReader that lists the tree of any checkpoint as entries, and loads the planned parts
    names   conversion between named entries and trees; tensors as NumPy arrays over the same memory
"""

from __future__ import annotations

import importlib
import os
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from ckptcore.training import expanded_location
from ckptcore_integrations.torch_dcp.reader import Reader
from ckptcore_integrations.torch_dcp.writer import Writer

__all__ = ["Reader", "Writer", "async_save", "load", "save"]


def save(
    state_dict: dict[str, Any],
    *positional: Any,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Save a state dict, as `torch.distributed.checkpoint.save` does.

    Without a `storage_writer`, a `Writer` writes the checkpoint. With ``use_collectives=False`` the original writer
    is used, because ranks cannot commit together without communication.

    Raises:
        CheckpointException: a rank failed. Raised on every rank; nothing was committed.
    """
    metadata: Metadata = state_dict_saver.save(
        state_dict,
        *positional,
        checkpoint_id=_expanded(checkpoint_id),
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
        use_collectives=use_collectives,
        **_writing(storage_writer, None if positional else checkpoint_id, use_collectives),
    )
    return metadata


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[Metadata] | AsyncSaveResponse:
    """Copy a state dict, and save it in the background, as `torch.distributed.checkpoint.async_save` does.

    See `save`. The future raises the errors of the save.
    """
    started: Future[Metadata] | AsyncSaveResponse = state_dict_saver.async_save(
        state_dict,
        checkpoint_id=_expanded(checkpoint_id),
        planner=planner,
        process_group=process_group,
        async_checkpointer_type=async_checkpointer_type,
        async_stager=async_stager,
        no_dist=no_dist,
        use_collectives=use_collectives,
        **_writing(storage_writer, checkpoint_id, use_collectives),
    )
    return started


def load(
    state_dict: dict[str, Any],
    *positional: Any,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Load into a state dict in place, as `torch.distributed.checkpoint.load` does.

    Without a `storage_reader`, a `Reader` reads the checkpoint, which can be in any layout of ckptcore.

    Raises:
        CheckpointException: a rank failed. Raised on every rank.
    """
    if storage_reader is None and checkpoint_id and not positional:
        storage_reader = Reader(checkpoint_id)
    try:
        state_dict_loader.load(
            state_dict,
            *positional,
            checkpoint_id=_expanded(checkpoint_id),
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
            **({} if storage_reader is None else {"storage_reader": storage_reader}),
        )
    except CheckpointException as error:
        if isinstance(storage_reader, Reader) and storage_reader.failure is not None:
            error.add_note(str(storage_reader.failure))
        raise


def _expanded(checkpoint_id: str | os.PathLike[str] | None) -> str | os.PathLike[str] | None:
    """Return a location with ``~`` expanded, because the original writer does not expand it."""
    if not checkpoint_id:
        return checkpoint_id
    expanded = expanded_location(checkpoint_id)
    return checkpoint_id if expanded == os.fspath(checkpoint_id) else expanded


def _writing(
    given: StorageWriter | None, checkpoint_id: str | os.PathLike[str] | None, use_collectives: bool
) -> dict[str, Any]:
    """Return the keyword argument with the given writer, or with ours if none is given.

    If neither a writer nor a location is given, the result is empty, because a writer may be the second positional
    argument of `save`.
    """
    if given is None and checkpoint_id and use_collectives:
        given = Writer(checkpoint_id)
    return {} if given is None else {"storage_writer": given}


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(dcp, name)
    except AttributeError:
        pass
    try:
        return importlib.import_module(f"{dcp.__name__}.{name}")
    except ModuleNotFoundError:
        raise AttributeError(f"module {dcp.__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(dcp)})
