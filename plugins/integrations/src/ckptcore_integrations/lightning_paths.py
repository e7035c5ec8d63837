"""Paths of Lightning's checkpoints, and how a checkpoint replaces what Lightning wrote at one of them.

At a path can be a checkpoint, a file or a directory that Lightning wrote itself, or a link to another path. Lightning
replaces and removes all of them, and so does its adapter. The next save or load finishes a replacement that was killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Final, TypeAlias

from lightning.fabric.utilities.cloud_io import get_filesystem

import ckptcore
from ckptcore import Context
from ckptcore.errors import CheckpointError, CheckpointNotFoundError, StorageError
from ckptcore_integrations.added_files import is_checkpoint
from ckptcore_integrations.lightning_disk import create_link, is_dangling, newest_neighbor, replacing_path

_Path: TypeAlias = str | Path

_SHARDED_METADATA: Final = "meta.pt"
"""A file in the directories that Lightning's own sharded strategies write."""


def is_of_lightning(path: _Path) -> bool:
    """Return True for what Lightning itself replaces and removes: a file, a link, or a directory of sharded state.

    A link may be of `save_last="link"`: a save through it would replace another checkpoint.
    """
    if "://" in os.fspath(path):
        try:
            return bool(get_filesystem(path).isfile(os.fspath(path)))
        except (ImportError, ValueError):
            return False  # fsspec, and so Lightning, does not know the storage
    if os.path.islink(path) or os.path.isfile(path):
        return True
    return os.path.isfile(os.path.join(path, _SHARDED_METADATA)) and not is_checkpoint(path)


def is_replaced_later(path: _Path, context: Context) -> bool:
    """Return True if what is at a path is replaced by `finish_replacement`: of Lightning, or in an object store.

    An object store cannot replace a checkpoint atomically, not even a damaged one.
    """
    if is_of_lightning(path):
        return True
    if "://" not in os.fspath(path):
        return False
    try:
        ckptcore.metadata(path, context=context)
    except CheckpointNotFoundError:
        return False
    except StorageError:
        raise  # nothing is known about the checkpoint
    except CheckpointError:
        pass  # damaged, or not readable here
    return True


def as_directory(path: _Path) -> str:
    """Return a path for a save. Names that end in ``.ckpt`` are those of files, unless they end in a slash."""
    return f"{os.fspath(path).rstrip('/')}/"


def delete(path: _Path, context: Context) -> None:
    """Delete a checkpoint of ckptcore or of Lightning, if it exists. Of a symbolic link, delete only the link."""
    with contextlib.suppress(CheckpointNotFoundError):  # before the other, which it would replace
        ckptcore.delete(replacing_path(path), other_files=True, context=context)
    if is_of_lightning(path):
        _remove(path)
        return
    with contextlib.suppress(CheckpointNotFoundError):
        ckptcore.delete(path, other_files=True, context=context)


def _remove(path: _Path) -> None:
    """Remove what is of Lightning."""
    if "://" in os.fspath(path):
        get_filesystem(path).rm(os.fspath(path))
    elif os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def finish_replacement(path: _Path, context: Context) -> None:
    """Replace what is at a path by the checkpoint next to it. At each moment, one of the two is complete."""
    replacing = replacing_path(path)
    if is_of_lightning(path):
        _remove(path)
    else:
        ckptcore.delete(path, other_files=True, context=context)
    if "://" in os.fspath(path):  # object stores cannot rename
        ckptcore.copy(replacing, as_directory(path), context=context)
        ckptcore.delete(replacing, other_files=True, context=context)
    else:
        os.rename(replacing, path)


def recover(path: _Path, context: Context) -> None:
    """Finish a replacement of a process that was killed before its last step."""
    replacing = replacing_path(path)
    if "://" not in replacing:
        _rename_back(path)
    elif _is_complete(replacing, context):
        if is_of_lightning(path):
            _remove(path)
        if not _is_complete(path, context):
            ckptcore.copy(
                replacing, as_directory(path), overwrite="non-atomic", context=context
            )  # of a damaged checkpoint
        ckptcore.delete(replacing, other_files=True, context=context)


def to_load(path: _Path, context: Context) -> _Path:
    """Return where the checkpoint of a path is, also after a replacement that was killed. All processes may do this."""
    replacing = replacing_path(path)
    if "://" not in replacing:
        _rename_back(path)
        return newest_neighbor(path, lambda found: step_of(found, context)) or path if is_dangling(path) else path
    return replacing if not _is_complete(path, context) and _is_complete(replacing, context) else path


def _rename_back(path: _Path) -> None:
    if not os.path.lexists(path):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.rename(replacing_path(path), path)


def _is_complete(location: _Path, context: Context) -> bool:
    try:
        ckptcore.metadata(location, context=context)
    except StorageError:
        raise  # nothing is known about the checkpoint
    except CheckpointError:
        return False
    return True


def create_parent(path: _Path) -> None:
    """Create the directory of a local path now, as Lightning does. The save creates it later, or says why it cannot."""
    if "://" not in os.fspath(path):
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)


def replace_by_link(path: str, link: str, context: Context) -> None:
    """Replace what is at `link` by a link to a checkpoint."""
    if os.path.lexists(link):
        delete(replacing_path(link), context)
    create_link(path, link)
    delete(replacing_path(link), context)


def step_of(path: _Path, context: Context) -> int | None:
    """Return the global step of a checkpoint, or None if it cannot be read."""
    try:
        state = ckptcore.load(path, select=ckptcore.select.names("global_step"), context=context)
    except StorageError:
        raise  # nothing is known about the checkpoint
    except CheckpointError:
        return None
    step = state["global_step"]
    return step if isinstance(step, int) else None


def is_directory(path: _Path) -> bool:
    """Return True for a checkpoint that is no file of Lightning, also if it is being replaced or its link dangles."""
    if "://" in os.fspath(path):
        return not is_of_lightning(path)
    return (
        os.path.isdir(path) or is_dangling(path) or (not os.path.exists(path) and os.path.exists(replacing_path(path)))
    )
