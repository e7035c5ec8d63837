"""Checkpoints of Hugging Face Accelerate, written and read by ckptcore.

`CheckpointMixin` replaces what ``accelerator.save_state`` writes and ``accelerator.load_state`` reads. A directory is
one checkpoint of ckptcore, committed as a whole: ``model``, ``optimizer``, ``scheduler`` and ``custom_checkpoint_0``,
with numbers from the second on, and ``process``, which has the random generators, data loaders and gradient scaler of
each process as Accelerate writes them. Files of hooks are next to them.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ckptcore
from ckptcore_integrations.added_files import (
    ObjectWithFiles,
    SaveWithFiles,
    check_files,
    digests_of,
    is_checkpoint,
    read_files,
)

if TYPE_CHECKING:
    _Accelerator = Any
else:
    _Accelerator = object
from ckptcore_integrations.own_options import own_options

__all__ = ["CheckpointMixin"]

_NAMING = "ProjectConfiguration(automatic_checkpoint_naming=True)"
_UNSUPPORTED = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")


@own_options()
class CheckpointMixin(_Accelerator):
    """Saves and loads the state of an Accelerator: ``class MyAccelerator(CheckpointMixin, Accelerator)``.

    `save_state` and `load_state` have the arguments of Accelerate, and call the hooks that were registered with
    ``register_save_state_pre_hook`` and ``register_load_state_pre_hook``. Directories that Accelerate wrote are loaded
    as well. All processes of a job must see the same directory.

    Attributes:
        save_in_background: True to return from `save_state` once the state is copied, and to write while the training
            continues. A failed save then raises at the next save, or at `end_training`.
    """

    save_in_background = False
    step: int
    _pending: Callable[[], None] | None = None

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare objects, and check that they can be saved. See ``accelerate.Accelerator.prepare``.

        Raises:
            NotImplementedError: see `save_state`.
            UnsupportedLeafError: lists what cannot be saved or restored.
        """
        _refuse_unsupported(self)
        before = self._checkpointables()
        prepared = super().prepare(*args, **kwargs)
        self._check_new(before)
        return prepared

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Register objects, and check that they can be saved.

        See ``accelerate.Accelerator.register_for_checkpointing``.

        Raises:
            UnsupportedLeafError: lists what cannot be saved or restored.
        """
        before = self._checkpointables()
        super().register_for_checkpointing(*objects)
        self._check_new(before)

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Path:
        """Save models, optimizers, schedulers, data loaders, random generators and registered objects.

        Args:
            output_dir: the new directory. A checkpoint of ckptcore there is replaced atomically. Not used with
                ``automatic_checkpoint_naming``: then it is ``checkpoints/checkpoint_<iteration>`` in the project, and
                directories beyond ``total_limit`` are deleted after the commit, those with the lowest numbers first,
                but never the one that was just saved.
            safe_serialization: must be True, because nothing is pickled.
            kwargs: must be empty. Accelerate passes them to DeepSpeed.

        Returns:
            The directory.

        Raises:
            NotImplementedError: for DeepSpeed, FSDP, Megatron-LM, XLA, ``save_on_each_node`` and arguments that are not
                supported.
            ValueError: there is no directory to save to, or the named directory exists.
            CheckpointError: the save failed. An earlier checkpoint is unchanged.
        """
        _refuse_unsupported(self)
        _refuse_arguments("save_state", kwargs if safe_serialization else {**kwargs, "safe_serialization": False})
        self.wait_for_checkpoint()
        location = self._new_directory(output_dir)
        weights = [self.get_state_dict(model) for model in self._models]
        files = self._files_of_hooks(weights)
        save = ckptcore.save_checkpointables_async if self.save_in_background else ckptcore.save_checkpointables
        process = ObjectWithFiles(self._save_process, self._load_process)
        handle = save(
            location,
            {**_numbered("model", weights), **self._objects(), "process": process},
            overwrite=not self.project_configuration.automatic_checkpoint_naming,
            metadata={"files": self._digests_of_all(files)},
            strategy=SaveWithFiles(files=files),
        )
        self.project_configuration.iteration += 1

        def finish() -> None:
            if handle is not None:
                handle.result()
            self._delete_old(location)

        self._pending = finish
        if not self.save_in_background:
            self.wait_for_checkpoint()
        return location

    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, load_kwargs: Any = None, **kwargs: Any
    ) -> None:
        """Load what `save_state` saved, in place.

        With ``automatic_checkpoint_naming``, the next save has a number above those of all existing directories, unless
        ``project_configuration.iteration`` is set to a higher one.

        Args:
            input_dir: the directory. None with ``automatic_checkpoint_naming``: the newest one.
            load_kwargs, kwargs: only for directories that Accelerate wrote. Must be empty for others.

        Raises:
            NotImplementedError: see `save_state`.
            ValueError: there is no directory to load from.
            CheckpointError: the checkpoint is damaged, has other objects, or was saved by another number of processes.
        """
        self.wait_for_checkpoint()
        directory = self._newest_directory() if input_dir is None else Path(input_dir).expanduser()
        if not is_checkpoint(directory):
            super().load_state(str(directory), load_kwargs, **kwargs)
            self._continue_numbers()
            return
        _refuse_unsupported(self)
        _refuse_arguments("load_state", kwargs if load_kwargs is None else {**kwargs, "load_kwargs": load_kwargs})
        check_files(directory)
        models = list(self._models)
        for hook in self._load_model_state_pre_hook.values():
            hook(models, str(directory))
        process = ObjectWithFiles(self._save_process, self._load_process)
        ckptcore.load_checkpointables(
            directory, into={**_numbered("model", models), **self._objects(), "process": process}
        )
        self._continue_numbers()

    def wait_for_checkpoint(self) -> None:
        """Wait until the last save is committed, then delete checkpoints beyond ``total_limit``.

        Raises:
            CheckpointError: the save failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()

    def end_training(self) -> None:
        """Wait for the last save. See ``accelerate.Accelerator.end_training``."""
        self.wait_for_checkpoint()
        super().end_training()

    def _checkpointables(self) -> dict[str, Any]:
        """Return what a checkpoint has besides files."""
        return {**_numbered("model", self._models), **self._objects()}

    def _check_new(self, before: Mapping[str, Any]) -> None:
        """Check the objects that were prepared or registered since. In a job, every process has the same ones."""
        if new := {name: value for name, value in self._checkpointables().items() if name not in before}:
            ckptcore.check_checkpointables(new)

    def _objects(self) -> dict[str, Any]:
        """Return what a checkpoint has besides models and files."""
        return {
            **_numbered("optimizer", [optimizer.optimizer for optimizer in self._optimizers]),
            **_numbered("scheduler", [scheduler.scheduler for scheduler in self._schedulers]),
            **{f"custom_checkpoint_{number}": custom for number, custom in enumerate(self._custom_objects)},
        }

    def _save_process(self, directory: str) -> None:
        from accelerate.checkpointing import save_accelerator_state

        save_accelerator_state(
            directory, [], [], [], self._dataloaders, self.process_index, self.step, self.scaler, save_on_each_node=True
        )

    def _load_process(self, directory: str) -> None:
        from accelerate.checkpointing import load_accelerator_state

        found = load_accelerator_state(directory, [], [], [], self._dataloaders, self.process_index, self.scaler)
        self.step = found.get("step", self.step)

    def _files_of_hooks(self, weights: list[Any]) -> dict[str, bytes]:
        """Call the hooks, which may remove weights, and return the files that they wrote."""
        if not self._save_model_state_pre_hook:
            return {}
        with tempfile.TemporaryDirectory(prefix="ckptcore-accelerate-") as name:
            for hook in self._save_model_state_pre_hook.values():
                hook(self._models, weights, name)
            return dict(read_files(name))

    def _digests_of_all(self, files: dict[str, bytes]) -> dict[str, Any]:
        """Return the digests of the files of all processes."""
        if not self._save_model_state_pre_hook:
            return {}
        from accelerate.utils import gather_object

        return {name: digest for own in gather_object([digests_of(files)]) for name, digest in own.items()}

    def _new_directory(self, output_dir: str | os.PathLike[str] | None) -> Path:
        if not self.project_configuration.automatic_checkpoint_naming:
            if output_dir is None:
                raise ValueError(
                    "save_state needs output_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)"
                )
            return Path(output_dir).expanduser()
        if self.project_dir is None:
            raise ValueError(f"{_NAMING} needs project_dir as well: set ProjectConfiguration(project_dir=...)")
        directory = Path(self.project_dir, "checkpoints", f"checkpoint_{self.save_iteration}")
        if directory.exists():
            raise ValueError(
                f"{directory} exists. Set accelerator.project_configuration.iteration to the number of the next save"
            )
        return directory

    def _newest_directory(self) -> Path:
        if not self.project_configuration.automatic_checkpoint_naming or self.project_dir is None:
            raise ValueError(f"load_state needs input_dir, or {_NAMING} and project_dir")
        found = _directories(Path(self.project_dir, "checkpoints"))
        if not found:
            raise ValueError(f"{self.project_dir} has no checkpoint to load")
        return found[-1]

    def _continue_numbers(self) -> None:
        """Set the number of the next save above all existing ones. Accelerate counts from 0, and loads the highest."""
        from accelerate.utils import gather_object

        config = self.project_configuration
        if config.automatic_checkpoint_naming and self.project_dir is not None:  # without it, no save has a number
            numbers = [_number(directory) + 1 for directory in _directories(Path(self.project_dir, "checkpoints"))]
            config.iteration = max(gather_object([config.iteration, *numbers[-1:]]))

    def _delete_old(self, saved: Path) -> None:
        config = self.project_configuration
        if config.automatic_checkpoint_naming and config.total_limit is not None and self.is_main_process:
            others = [directory for directory in _directories(saved.parent) if directory != saved]
            for directory in others[: max(len(others) + 1 - max(config.total_limit, 1), 0)]:
                shutil.rmtree(directory)


def _numbered(name: str, objects: Sequence[Any]) -> dict[str, Any]:
    """Return objects by the names that Accelerate uses: ``model``, ``model_1``, ``model_2``."""
    return {name if number == 0 else f"{name}_{number}": found for number, found in enumerate(objects)}


def _directories(parent: Path) -> list[Path]:
    """Return the directories of saves with automatic names, oldest first."""
    names = os.listdir(parent) if parent.is_dir() else []
    return sorted([parent / name for name in names if re.fullmatch(r"checkpoint_\d+", name)], key=_number)


def _number(directory: Path) -> int:
    return int(directory.name.rpartition("_")[2])


def _refuse_unsupported(accelerator: Any) -> None:
    kind = accelerator.distributed_type.name
    if kind in _UNSUPPORTED or accelerator.project_configuration.save_on_each_node:
        named = kind if kind in _UNSUPPORTED else "save_on_each_node"
        raise NotImplementedError(
            f"CheckpointMixin does not support {named}. Remove CheckpointMixin from the bases of "
            f"{type(accelerator).__name__}, so that Accelerate writes its own files"
        )


def _refuse_arguments(method: str, arguments: dict[str, Any]) -> None:
    if arguments:
        raise NotImplementedError(
            f"{method}({', '.join(arguments)}=...) is not supported for checkpoints of ckptcore. Remove the argument"
        )
