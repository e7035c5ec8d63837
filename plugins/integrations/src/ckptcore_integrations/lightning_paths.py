"""Paths of Lightning's checkpoints, and replacement of the files at these paths.

A path can be that of a checkpoint of ckptcore, of a file or directory that Lightning wrote itself, or of a link. This
adapter can replace and remove all of them, as Lightning does. If a process is killed during a replacement, the next
save or load finishes it.

Checkpoints of ckptcore are directories, and may be committed in the background. But Lightning accesses the disk
directly: `ModelCheckpoint` checks if a file exists, creates links, and finds the last checkpoint by the time of files.
`load_from_checkpoint` opens a file. These functions do not call the `CheckpointIO`, and Lightning has no hook for them.
So `install` replaces them by functions that wait for the running save, create a link once its target is committed, and
choose checkpoints by step. For files, and for a Trainer without our adapter, they call Lightning's functions.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core import saving
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

import ckptcore
from ckptcore import Context
from ckptcore.errors import CheckpointError, CheckpointNotFoundError, StorageError
from ckptcore.events import logger_named
from ckptcore_integrations.added_files import is_checkpoint

_Path: TypeAlias = str | Path

_SHARDED_METADATA: Final = "meta.pt"
"""A file in the directories that Lightning's own sharded strategies write."""


def is_of_lightning(path: _Path) -> bool:
    """Return True for a path with a file, a link, or a directory of sharded state that Lightning wrote.

    Links are included, because `save_last="link"` creates them: a save through a link would replace its target.
    """
    if "://" in os.fspath(path):
        try:
            return bool(get_filesystem(path).isfile(os.fspath(path)))
        except (ImportError, ValueError):
            return False  # fsspec does not support the storage, so Lightning wrote nothing there
    if os.path.islink(path) or os.path.isfile(path):
        return True
    return os.path.isfile(os.path.join(path, _SHARDED_METADATA)) and not is_checkpoint(path)


def is_replaced_later(path: _Path, context: Context) -> bool:
    """Return True if a save must use `finish_replacement`: for Lightning's own files, and on object stores.

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
        pass  # damaged, or not readable by this process
    return True


def as_directory(path: _Path) -> str:
    """Return a path for a save, with a slash at the end. Otherwise a name that ends in ``.ckpt`` would mean a file."""
    return f"{os.fspath(path).rstrip('/')}/"


def delete(path: _Path, context: Context) -> None:
    """Delete a checkpoint of ckptcore or of Lightning, if it exists. If it is a symbolic link, delete only the link."""
    with contextlib.suppress(CheckpointNotFoundError):  # delete first what `recover` would move here
        ckptcore.delete(replacing_path(path), other_files=True, context=context)
    if is_of_lightning(path):
        _remove(path)
        return
    with contextlib.suppress(CheckpointNotFoundError):
        ckptcore.delete(path, other_files=True, context=context)


def _remove(path: _Path) -> None:
    """Remove a file, link or directory of Lightning."""
    if "://" in os.fspath(path):
        get_filesystem(path).rm(os.fspath(path))
    elif os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def finish_replacement(path: _Path, context: Context) -> None:
    """Replace the content of `path` by the checkpoint at `replacing_path`. One of the two is always complete."""
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
    """Finish a replacement that a killed process began."""
    replacing = replacing_path(path)
    if "://" not in replacing:
        _rename_back(path)
    elif _is_complete(replacing, context):
        if is_of_lightning(path):
            _remove(path)
        if not _is_complete(path, context):
            ckptcore.copy(
                replacing, as_directory(path), overwrite="non-atomic", context=context
            )  # there may be files of a damaged checkpoint
        ckptcore.delete(replacing, other_files=True, context=context)


def to_load(path: _Path, context: Context) -> _Path:
    """Return the location of the checkpoint of a path, even after an interrupted replacement.

    Any process may call this.
    """
    replacing = replacing_path(path)
    if "://" not in replacing:
        _rename_back(path)
        return newest_neighbor(path, lambda neighbor: step_of(neighbor, context)) or path if is_dangling(path) else path
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
    """Create the parent directory of a local path now, as Lightning does. Ignores errors: the save reports them."""
    if "://" not in os.fspath(path):
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)


def replace_by_link(path: str, link: str, context: Context) -> None:
    """Replace the content of `link` by a link to a checkpoint."""
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
    """Return True for a checkpoint that is not a file of Lightning.

    Includes interrupted replacements and dangling links.
    """
    if "://" in os.fspath(path):
        return not is_of_lightning(path)
    return (
        os.path.isdir(path) or is_dangling(path) or (not os.path.exists(path) and os.path.exists(replacing_path(path)))
    )


logger = logger_named("ckptcore.integrations.lightning")

_LINKED: Final = ".linking"
"""Suffix of the temporary name of a new link."""


class CommitsLater(ABC):
    """A part of a Trainer that saves its checkpoints, possibly in the background."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for the running save. Raises its error."""

    @abstractmethod
    def link(self, path: str, link: str) -> None:
        """Link to the checkpoint that was saved last, once it is committed."""

    @abstractmethod
    def step(self, path: str) -> int | None:
        """Return the global step of a checkpoint, or None if it cannot be read."""


def install(load: Callable[[Any, Any], dict[str, Any]], is_ours: Callable[[Any], bool]) -> None:
    """Replace the functions of Lightning.

    Args:
        load: returns the checkpoint of a path, with tensors on a device.
        is_ours: returns True for a path or URL of a checkpoint that is not a file of Lightning.
    """
    file_exists, link_checkpoint = ModelCheckpoint.file_exists, ModelCheckpoint._link_checkpoint
    find_last, remove = ModelCheckpoint._find_last_checkpoints, ModelCheckpoint._remove_checkpoint
    open_file = saving.pl_load

    def exists_once_saved(self: ModelCheckpoint, filepath: Any, trainer: Any) -> bool:
        _wait(trainer)
        answer: bool = file_exists(self, filepath, trainer)
        return answer

    def link_once_saved(trainer: Any, filepath: str, linkpath: str) -> None:
        saver = _saver(trainer)
        if saver is None:
            link_checkpoint(trainer, filepath, linkpath)
            return
        if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
            _wait_for_wrapper(trainer)
            saver.link(filepath, linkpath)
        trainer.strategy.barrier()

    def find_last_by_step(self: ModelCheckpoint, trainer: Any) -> set[str]:
        saver, answer = _saver(trainer), find_last(self, trainer)
        return answer if saver is None else _last_by_step(answer, saver)

    def remove_once_saved(self: ModelCheckpoint, trainer: Any, filepath: str) -> None:
        _wait_for_wrapper(trainer)
        remove(self, trainer, filepath)

    def load_directory(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if isinstance(path, str | os.PathLike) and not str(path).startswith("http") and is_ours(path):
            return load(path, None if map_location is saving._default_map_location else map_location)
        return open_file(path, map_location=map_location, weights_only=weights_only)

    ModelCheckpoint.file_exists = exists_once_saved
    ModelCheckpoint._link_checkpoint = staticmethod(link_once_saved)
    ModelCheckpoint._find_last_checkpoints = find_last_by_step
    ModelCheckpoint._remove_checkpoint = remove_once_saved
    saving.pl_load = load_directory


def _saver(trainer: Any) -> CommitsLater | None:
    """Return the part of a Trainer that saves with ckptcore, if it has one."""
    return saver_of(trainer.strategy) or saver_of(trainer.strategy.checkpoint_io)


def saver_of(part: object) -> CommitsLater | None:
    """Return our strategy or `CheckpointIO`, also from inside a wrapper. None if there is none."""
    while isinstance(part, _WrappingCheckpointIO):
        part = part.checkpoint_io
    return part if isinstance(part, CommitsLater) else None


def _wait(trainer: Any) -> None:
    _wait_for_wrapper(trainer)
    if (saver := _saver(trainer)) is not None:
        saver.wait()


def _wait_for_wrapper(trainer: Any) -> None:
    """Wait for an `AsyncCheckpointIO` of Lightning that wraps ours.

    It saves in the background but removes immediately.
    """
    io = trainer.strategy.checkpoint_io
    if isinstance(io, _WrappingCheckpointIO) and _saver(trainer) is not None:
        io.teardown()


def _last_by_step(paths: set[str], saver: CommitsLater) -> set[str]:
    """Return the path with the largest step.

    Ignores file times, because clocks differ, and because copies change times.
    """
    candidates = {newest_neighbor(path, saver.step) or path if is_dangling(path) else path for path in paths}
    steps = {path: saver.step(path) for path in candidates}
    known = [step for step in steps.values() if step is not None]
    if len(known) < len(steps) or not known:
        return candidates  # unreadable checkpoints may be new, so let Lightning choose
    return {path for path, step in steps.items() if step == max(known)}


def is_dangling(path: Any) -> bool:
    """Return True for a symbolic link to something that does not exist."""
    return os.path.islink(path) and not os.path.exists(path)


def newest_neighbor(link: Any, step_of: Callable[[str], int | None]) -> str | None:
    """Return the checkpoint with the largest step in the directory of the target of a link; None if there is none."""
    directory = os.path.dirname(os.path.join(os.path.dirname(link), os.readlink(link)))
    suffix = os.path.splitext(link)[1]
    steps: dict[str, int] = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in sorted(os.listdir(directory)):
            path = os.path.join(directory, name)
            if not name.startswith(".") and name.endswith(suffix) and os.path.exists(path):
                step = step_of(path)
                if step is None:
                    logger.warning("%s is not read, because it is damaged or no checkpoint", path)
                else:
                    steps[path] = step
    if not steps:
        return None
    newest = max(steps, key=lambda path: steps[path])
    logger.warning("%s links to %s, which does not exist: %s is loaded", link, os.readlink(link), newest)
    return newest


def create_link(path: str, link: str) -> None:
    """Replace the content of `link` by a symbolic link to a checkpoint.

    A directory is first moved to `replacing_path`.
    """
    made = link + _LINKED
    with contextlib.suppress(FileNotFoundError):
        os.unlink(made)
    os.symlink(os.path.relpath(path, os.path.dirname(link)), made)
    if os.path.isdir(link) and not os.path.islink(link):
        os.rename(link, replacing_path(link))
    os.replace(made, link)


def replacing_path(path: Any) -> str:
    """Return the location of a new checkpoint until it replaces the one at `path`.

    `ckpt_path="last"` finds this location for ``last.ckpt``. So a run that is killed in between resumes from it.
    """
    start, suffix = os.path.splitext(os.fspath(path))
    return f"{start}.replacing{suffix}"
