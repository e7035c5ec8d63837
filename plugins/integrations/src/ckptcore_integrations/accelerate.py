"""Checkpoints of Hugging Face Accelerate, written and read by ckptcore.

`CheckpointMixin` replaces what ``accelerator.save_state`` writes and ``accelerator.load_state`` reads. A directory is
one checkpoint of ckptcore, committed atomically. It has ``model``, ``optimizer``, ``scheduler`` and
``custom_checkpoint_0``; the second model is ``model_1``. ``process`` has the random generators, data loaders and
gradient scaler of each process, as Accelerate writes them. Files of hooks are in the same directory.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import ckptcore
from ckptcore.context import JobOptions, SingleProcess
from ckptcore.errors import CheckpointError, PartialLoadError
from ckptcore.events import logger_named
from ckptcore.temporary import temporary_directory
from ckptcore.training import expanded_location
from ckptcore_integrations.added_files import (
    ObjectWithFiles,
    SaveWithFiles,
    check_files,
    digests_of,
    is_checkpoint,
    read_files,
)
from ckptcore_integrations.own_options import own_options
from ckptcore_integrations.random_states import keeping_random_states, problem_with_random_states
from ckptcore_integrations.training_kinds import optimizer_to_load, training_kind

if TYPE_CHECKING:
    _Accelerator = Any
else:
    _Accelerator = object

__all__ = ["CheckpointMixin"]

logger = logger_named("ckptcore.integrations.accelerate")

_ALONE: Final = ckptcore.Context(job=JobOptions(coordinator=SingleProcess()))
_NAMING = "ProjectConfiguration(automatic_checkpoint_naming=True)"
_UNSUPPORTED = ("MEGATRON_LM", "XLA")


@own_options()
class CheckpointMixin(_Accelerator):
    """Saves and loads the state of an Accelerator: ``class MyAccelerator(CheckpointMixin, Accelerator)``.

    `save_state` and `load_state` have the arguments of Accelerate, and call the hooks that were registered with
    ``register_save_state_pre_hook`` and ``register_load_state_pre_hook``. Directories that Accelerate wrote can also
    be loaded. All processes of a job must see the same directory.

    Attributes:
        save_in_background: True to return from `save_state` once the state is copied, and to write while the training
            continues. A failed save then raises at the next save, or at `end_training`.
        require_random_states: True to raise an error if random generators cannot continue exactly. By default,
            `load_state` logs a warning.
    """

    save_in_background = False
    require_random_states = False
    step: int
    _warned_of_workers = False
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

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare a data loader. See ``accelerate.Accelerator.prepare_data_loader``."""
        loader = super().prepare_data_loader(*args, **kwargs)
        if getattr(loader, "use_stateful_dataloader", False) and loader.num_workers > 0:
            # Accelerate starts the workers of the first epoch before it sets the seedable sampler. The workers then
            # shuffle with another seed, which a resumed run cannot reproduce. Restart the workers.
            loader.base_dataloader.load_state_dict({})
        return loader

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
                ``automatic_checkpoint_naming``, which saves to ``checkpoints/checkpoint_<iteration>`` in the project.
                After the commit, directories beyond ``total_limit`` are deleted, those with the lowest numbers first.
                The new checkpoint, and directories with higher numbers, are never deleted.
            safe_serialization: must be True, because nothing is pickled.
            kwargs: must be empty. Accelerate passes them to DeepSpeed.

        Returns:
            The directory.

        Raises:
            NotImplementedError: for Megatron-LM, XLA, ``save_on_each_node``, parts of DeepSpeed that are not supported,
                and arguments that are not supported.
            ValueError: there is no directory to save to, or the named directory exists.
            CheckpointError: the save failed. An earlier checkpoint is unchanged.
        """
        _refuse_unsupported(self)
        _refuse_arguments("save_state", kwargs if safe_serialization else {**kwargs, "safe_serialization": False})
        self.wait_for_checkpoint()
        self._warn_of_workers()
        location = self._new_directory(output_dir)
        # Hooks may remove weights. If no process has all weights, Accelerate passes no weights to hooks.
        kind = training_kind(*self._models)
        weights = [self.get_state_dict(model) for model in self._models] if kind.is_whole else []
        files = self._files_of_hooks(weights)
        save = ckptcore.save_checkpointables_async if self.save_in_background else ckptcore.save_checkpointables
        process = ObjectWithFiles(self._save_process, self._load_process)
        models = weights if kind.is_whole else [kind.model(model) for model in self._models]
        with kind.state_dicts(*self._models):
            handle = save(
                location,
                {**_numbered("model", models), **self._objects(), "process": process},
                overwrite=False if self.project_configuration.automatic_checkpoint_naming else "with-other-files",
                metadata={"files": self._digests_of_all(files)},
                strategy=SaveWithFiles(files=files),
                context=kind.context,
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
        """Load a checkpoint of `save_state`, in place.

        With ``automatic_checkpoint_naming``, the next save has a number above those of all existing directories, unless
        ``project_configuration.iteration`` is set to a higher one.

        Args:
            input_dir: the directory. With ``automatic_checkpoint_naming``, None means the newest directory.
            load_kwargs, kwargs: only for directories that Accelerate wrote. Must be empty for others.

        Raises:
            NotImplementedError: see `save_state`.
            ValueError: there is no directory to load from.
            CheckpointError: the checkpoint is damaged or has other objects, or random generators cannot continue and
                ``require_random_states`` is True.
        """
        self.wait_for_checkpoint()
        directory = self._newest_directory() if input_dir is None else Path(expanded_location(input_dir))
        if not is_checkpoint(directory):
            super().load_state(str(directory), load_kwargs, **kwargs)
            if problem := problem_with_random_states(directory, self.process_index):
                self._report_random_states(f"process {self.process_index}: {problem}")
            self._continue_numbers()
            return
        _refuse_unsupported(self)
        _refuse_arguments("load_state", kwargs if load_kwargs is None else {**kwargs, "load_kwargs": load_kwargs})
        check_files(directory)
        kind = training_kind(*self._models)
        models = list(self._models) if kind.is_whole else []
        for hook in self._load_model_state_pre_hook.values():
            hook(models, str(directory))
        if not kind.is_whole:
            models = [kind.model(model) for model in self._models]
        into = {**_numbered("model", models), **self._objects(load=True)}
        with kind.state_dicts(*self._models):
            try:
                ckptcore.load_checkpointables(
                    directory,
                    into={**into, "process": ObjectWithFiles(self._save_process, self._load_process)},
                    context=kind.context,
                )
            except PartialLoadError as error:
                self._load_of_other_processes(directory, {name: into.get(name) for name in error.names})
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
        """Return the checkpointables of a checkpoint, without files."""
        kind = training_kind(*self._models)
        return {**_numbered("model", [kind.model(model) for model in self._models]), **self._objects()}

    def _check_new(self, before: Mapping[str, Any]) -> None:
        """Check the objects that are not in `before`. Every process of a job has the same objects."""
        if new := {name: value for name, value in self._checkpointables().items() if name not in before}:
            kind = training_kind(*self._models)
            with kind.state_dicts(*self._models):
                ckptcore.check_checkpointables(new, context=kind.context)

    def _objects(self, *, load: bool = False) -> dict[str, Any]:
        """Return the checkpointables other than models, to save or to load into."""
        kind = training_kind(*self._models)
        pairs = [(_model_of(optimizer, self._models), optimizer.optimizer) for optimizer in self._optimizers]
        optimizers = [optimizer_to_load(kind, *pair) if load else kind.optimizer(*pair) for pair in pairs]
        others = [kind.others(model) for model in self._models]
        names = dict.fromkeys([name for objects in others for name in objects])
        return {
            **_numbered("optimizer", optimizers),
            **{
                of: value
                for name in names
                for of, value in _numbered(name, [objects[name] for objects in others]).items()
            },
            **_numbered("scheduler", [scheduler.scheduler for scheduler in kind.schedulers(self._schedulers)]),
            **{f"custom_checkpoint_{number}": custom for number, custom in enumerate(self._custom_objects)},
        }

    def _save_process(self, directory: str) -> None:
        from accelerate.checkpointing import save_accelerator_state

        save_accelerator_state(
            directory, [], [], [], self._dataloaders, self.process_index, self.step, self.scaler, save_on_each_node=True
        )

    def _load_process(self, directory: str) -> None:
        self._load_process_of(self.process_index, directory)

    def _load_process_of(self, rank: int, directory: str) -> None:
        """Load the state that a rank saved. If this is another process, do not restore the random generators."""
        from accelerate.checkpointing import load_accelerator_state

        with keeping_random_states() if rank != self.process_index else contextlib.nullcontext():
            values = load_accelerator_state(directory, [], [], [], self._dataloaders, rank, self.scaler)
        self.step = values.get("step", self.step)
        if rank == self.process_index and (problem := problem_with_random_states(Path(directory), rank)):
            self._report_random_states(f"process {rank}: {problem}")

    def _load_of_other_processes(self, directory: Path, names: Mapping[str, Any]) -> None:
        """Load objects with a state per process that a different number of processes saved."""
        processes = ckptcore.metadata(directory).checkpointables.processes
        for name, target in names.items():
            saved = processes[name]
            rank = min(self.process_index, saved - 1)
            source = directory / (f"{name}.rank_{rank}" if saved > 1 else name)
            if name == "process":
                with temporary_directory("of the states of a process") as files:
                    for file, content in ckptcore.load(source, context=_ALONE).items():
                        Path(files, file).write_bytes(content)
                    self._load_process_of(rank, files)
            elif rank == self.process_index:
                ckptcore.load_into(source, target, context=_ALONE)
            if rank != self.process_index:
                problem = f"{directory} has no state of process {self.process_index}"
                if name == "process":
                    self._report_random_states(f"{problem}: its data loaders continue where process {rank} was")
                else:
                    logger.warning("%s for %s: it is unchanged", problem, name)

    def _report_random_states(self, problem: str) -> None:
        message = f"random numbers do not continue as they would have: {problem}"
        if self.require_random_states:
            raise CheckpointError(
                f"{message}. Load a checkpoint of this job, or set {type(self).__name__}.require_random_states = False"
            )
        logger.warning(message)

    def _warn_of_workers(self) -> None:
        """Warn once of data loaders whose workers may draw random numbers. torchdata does not save their generators."""
        if self._warned_of_workers:
            return
        self._warned_of_workers = True
        for number, loader in enumerate(self._dataloaders):
            if (
                getattr(loader, "use_stateful_dataloader", False)
                and loader.num_workers > 0
                and not hasattr(loader.dataset, "state_dict")
            ):
                logger.warning(
                    "data loader %d has %d workers, whose random generators are not saved: if the dataset or the "
                    "transforms of %s draw random numbers, a resume in the middle of an epoch draws others. Wrap it: "
                    "DataLoader(WithRandomState(dataset), ...), from ckptcore_integrations.random_states",
                    number,
                    loader.num_workers,
                    type(loader.dataset).__name__,
                )

    def _files_of_hooks(self, weights: list[Any]) -> dict[str, bytes]:
        """Call the hooks, which may remove weights, and return the files that they wrote."""
        if not self._save_model_state_pre_hook:
            return {}
        with temporary_directory("of the files of hooks") as name:
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
            return Path(expanded_location(output_dir))
        if self.project_dir is None:
            raise ValueError(f"{_NAMING} needs project_dir as well: set ProjectConfiguration(project_dir=...)")
        directory = Path(expanded_location(self.project_dir), "checkpoints", f"checkpoint_{self.save_iteration}")
        if directory.exists():
            raise ValueError(
                f"{directory} exists. Set accelerator.project_configuration.iteration to the number of the next save"
            )
        return directory

    def _newest_directory(self) -> Path:
        if not self.project_configuration.automatic_checkpoint_naming or self.project_dir is None:
            raise ValueError(f"load_state needs input_dir, or {_NAMING} and project_dir")
        directories = _directories(Path(expanded_location(self.project_dir), "checkpoints"))
        if not directories:
            raise ValueError(f"{self.project_dir} has no checkpoint to load")
        return directories[-1]

    def _continue_numbers(self) -> None:
        """Set the number of the next save above all existing ones. Accelerate counts from 0, and loads the highest."""
        from accelerate.utils import gather_object

        config = self.project_configuration
        if config.automatic_checkpoint_naming and self.project_dir is not None:  # only automatic names have numbers
            numbers = [
                _number(directory) + 1
                for directory in _directories(Path(expanded_location(self.project_dir), "checkpoints"))
            ]
            config.iteration = max(gather_object([config.iteration, *numbers[-1:]]))

    def _delete_old(self, saved: Path) -> None:
        config = self.project_configuration
        if config.automatic_checkpoint_naming and config.total_limit is not None and self.is_main_process:
            directories = _directories(saved.parent)
            # Higher numbers remain if a run resumed from an older checkpoint. Keep them: they may be the newest
            # undamaged ones.
            old = [directory for directory in directories if _number(directory) < _number(saved)]
            for directory in old[: max(len(directories) - max(config.total_limit, 1), 0)]:
                shutil.rmtree(directory)


def _numbered(name: str, objects: Sequence[Any]) -> dict[str, Any]:
    """Return objects by the names that Accelerate uses: ``model``, ``model_1``, ``model_2``."""
    return {name if number == 0 else f"{name}_{number}": item for number, item in enumerate(objects)}


def _model_of(optimizer: Any, models: Sequence[Any]) -> Any:
    """Return the model of an optimizer, or None. An engine of DeepSpeed has an attribute with its optimizer."""
    for model in models:
        if getattr(model, "optimizer", None) is optimizer.optimizer:
            return model
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return next((model for model in models if any(id(parameter) in own for parameter in model.parameters())), None)


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
