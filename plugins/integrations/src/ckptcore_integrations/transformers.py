"""Checkpoints of the Trainer of Hugging Face Transformers, written and read by ckptcore.

`CheckpointMixin` replaces the files that the Trainer writes at a step and reads when it resumes. `newest_sound` finds
the checkpoint to resume from. `export_pretrained` makes a directory for ``from_pretrained`` from a checkpoint.

A directory ``checkpoint-<step>`` is one checkpoint of ckptcore, committed atomically:

================================  ====================================================================
``model``                         the weights, ``model/model.safetensors``
``optimizer``, ``scheduler``      their states
``scaler``                        the gradient scaler, if there is one
``random``                        the random generators of each process, as the Trainer writes them
``trainer_state.json``            the Trainer's state, which includes the position in the data
``config.json`` and others        other files that the Trainer writes
``model.safetensors.index.json``  refers to ``model``, so that ``from_pretrained`` opens the directory; not with FSDP
``adapter_model.safetensors``     adapters as PEFT writes them, instead of the index, and ``adapter_config.json``
================================  ====================================================================
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from huggingface_hub import HfApi
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerState
from transformers.trainer_utils import HubStrategy, SaveStrategy

import ckptcore
from ckptcore.context import JobOptions, SingleProcess
from ckptcore.errors import CheckpointError
from ckptcore.events import logger_named
from ckptcore.temporary import temporary_directory
from ckptcore_integrations.adapters import frozen_names, gathered_adapters, has_adapters, outside_of_adapters
from ckptcore_integrations.added_files import (
    ObjectWithFiles,
    SaveWithFiles,
    check_files,
    digests_of,
    is_checkpoint,
    read_files,
)
from ckptcore_integrations.own_options import own_options
from ckptcore_integrations.trainer_steps import (
    bring_back,
    delete_old_steps,
    delete_set_aside,
    newest_sound_step,
    set_aside,
)
from ckptcore_integrations.training_kinds import Adapters, TrainingKind, optimizer_to_load, training_kind

if TYPE_CHECKING:
    from ckptcore.results import SaveHandle

    _Trainer = Any
else:
    _Trainer = object

__all__ = ["CheckpointMixin", "export_pretrained", "newest_sound"]

logger = logger_named("ckptcore.integrations.transformers")

_STATE = "trainer_state.json"
_INDEX = "model.safetensors.index.json"
_ALONE: Final = ckptcore.Context(job=JobOptions(coordinator=SingleProcess()))
_WEIGHTS = ("model.safetensors", _INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
_ONE_FILE = ckptcore.SafetensorsLayout(max_file_bytes=sys.maxsize)  # the index names one file of weights


@own_options()
class CheckpointMixin(_Trainer):
    """Saves and resumes a ``transformers.Trainer`` with ckptcore: ``class MyTrainer(CheckpointMixin, Trainer)``.

    All arguments of the Trainer keep their meaning: ``save_strategy``, ``save_total_limit``, ``save_only_model``,
    ``load_best_model_at_end``, ``resume_from_checkpoint``. Checkpoints of a plain Trainer can be resumed too.
    All processes of a job must see the same ``output_dir``, except with ``save_on_each_node``: then each node saves its
    own checkpoint.

    For a model with PEFT adapters, a checkpoint contains the tensors that are trained, and the files that PEFT writes.
    With FSDP, all processes save their shards into one checkpoint, which any number of processes can load.

    Attributes:
        save_in_background: True to return from a save once the state is copied, and to write while the training
            continues. A failed save then raises at the next save, or at the end of the training.

    Raises:
        NotImplementedError: raised by `train` with XLA, SageMaker, `PeftMixedModel`, adapters with FSDP 1, or
            ``save_on_each_node`` with shards.
        UnsupportedLeafError: raised by `train` before the first step. Lists what cannot be saved or restored.
    """

    save_in_background = False
    _pending: Callable[[], None] | None = None
    _nodes = 1

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Check that the state can be saved, and train. See ``transformers.Trainer.train``."""
        _refuse_unsupported(self)
        self._nodes = _number_of_nodes(self.args) if self.args.save_on_each_node else 1
        if self.args.should_save:
            bring_back(Path(self.args.output_dir))
        check = _CheckState(self)
        self.add_callback(check)
        try:
            return super().train(*args, **kwargs)
        except BaseException:
            # Also after Ctrl-C, because the next training in this process may save the same step.
            try:
                self.wait_for_checkpoint()
            except CheckpointError as error:
                logger.warning("the last save failed as well: %s", error)
            raise
        finally:
            self.remove_callback(check)

    def wait_for_checkpoint(self) -> None:
        """Wait until the last save is committed, then delete checkpoints beyond ``save_total_limit``.

        Raises:
            CheckpointError: the save failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.wait_for_checkpoint()
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        directory = self._get_output_dir(trial=trial)
        location = _step_directory(directory, self.state.global_step)
        if self.state.best_global_step:
            best = _step_directory(directory, self.state.best_global_step)
            if best == location or os.path.exists(best):
                self.state.best_model_checkpoint = best
        exportable: list[Any] = [
            callback
            for callback in (*self.callback_handler.callbacks, self.control)
            if isinstance(callback, ExportableState)
        ]
        self.state.stateful_callbacks = TrainerState(stateful_callbacks=exportable).stateful_callbacks

        kind = self._kind()
        with kind.state_dicts(self.model_wrapped):
            weights = self._weights_to_write(kind)
        files = self._other_files(weights) if self.args.should_save else {}
        if self.args.should_save and os.path.isdir(location) and not is_checkpoint(location):
            set_aside(location)  # a plain Trainer wrote this directory
        save = ckptcore.save_checkpointables_async if self.save_in_background else ckptcore.save_checkpointables
        checkpointables = self._checkpointables(kind)
        handle = None
        if self.args.should_save or not self._has_own_disks():
            with kind.state_dicts(self.model_wrapped):
                handle = save(
                    location,
                    checkpointables,
                    layout=_ONE_FILE,
                    overwrite="with-other-files",  # callbacks add files to steps, and will write them again
                    metadata={"files": digests_of(files)},
                    strategy=SaveWithFiles(files=files),
                    context=self._context(kind),
                )
        self._pending = self._after_save(handle, location)
        if not self.save_in_background:
            self.wait_for_checkpoint()

    def _kind(self) -> TrainingKind:
        kind = training_kind(self.model_wrapped, gather_weights=True)
        return Adapters() if kind.is_whole and has_adapters(self.model) else kind

    def _checkpointables(self, kind: TrainingKind) -> dict[str, Any]:
        """Return the checkpointables of a checkpoint, without files."""
        objects = {"model": kind.model(self.model_wrapped)}
        if not self.args.save_only_model:
            objects["optimizer"] = kind.optimizer(self.model_wrapped, self.optimizer)
            objects |= {**kind.others(self.model_wrapped), **self._scheduler(kind), "random": self._random_state()}
            if getattr(self.accelerator, "scaler", None) is not None:
                objects["scaler"] = self.accelerator.scaler
        return objects

    def _scheduler(self, kind: TrainingKind) -> dict[str, Any]:
        return {"scheduler": self.lr_scheduler} if kind.schedulers([self.lr_scheduler]) else {}

    def _has_own_disks(self) -> bool:
        """Return True if each node saves its own checkpoint, with the random generators of all processes."""
        return self.args.save_on_each_node and self._nodes > 1

    def _context(self, kind: TrainingKind) -> ckptcore.Context | None:
        return _ALONE if self._has_own_disks() else kind.context

    def _random_state(self) -> ObjectWithFiles:
        if not self._has_own_disks():
            return ObjectWithFiles(super()._save_rng_state, super()._load_rng_state)
        with temporary_directory("of the files of the Trainer") as name:
            super()._save_rng_state(name)
            states: list[Any] = [None] * self.args.world_size
            torch.distributed.all_gather_object(states, read_files(name))

        def write(directory: str) -> None:
            for file, content in (row for files in states for row in files.items()):
                Path(directory, file).write_bytes(content)

        return ObjectWithFiles(write, super()._load_rng_state)

    def _weights_to_write(self, kind: TrainingKind) -> dict[str, Any] | None:
        """Return the adapter weights that the Trainer writes into files. None means that PEFT collects them itself."""
        if not has_adapters(self.model):
            return {}
        if kind.is_whole:
            return None
        if self.is_deepspeed_enabled:
            engine = self.model_wrapped
            if engine.zero_optimization_partition_weights() and not engine.zero_gather_16bit_weights_on_model_save():
                gathered: dict[str, Any] = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
                return gathered
            return self.accelerator.get_state_dict(self.model_wrapped)  # type: ignore[no-any-return]  # untyped
        return gathered_adapters(self.model_wrapped)

    def _other_files(self, weights: dict[str, Any] | None) -> Mapping[str, bytes]:
        """Return the Trainer's files without weights, but with an index of the weights and the Trainer's state."""
        sizes = self._kind().sizes_of_weights(self.model_wrapped)
        with temporary_directory("of the files of the Trainer") as name:
            directory = Path(name)
            self._save(name, state_dict=weights)
            for weights_file in _WEIGHTS:
                (directory / weights_file).unlink(missing_ok=True)
            if sizes is not None:
                index = {
                    "metadata": {"total_size": sum(sizes.values())},
                    "weight_map": dict.fromkeys(sizes, "model/model.safetensors"),
                }
                (directory / _INDEX).write_text(json.dumps(index))
            self.state.save_to_json(os.path.join(name, _STATE))
            return read_files(name)

    def _after_save(self, handle: SaveHandle | None, location: str) -> Callable[[], None]:
        best = self.state.best_model_checkpoint

        def finish() -> None:
            if handle is not None:
                handle.result()
            if self.args.push_to_hub:
                self._push_from_checkpoint(location)
            if self.args.should_save:
                delete_set_aside(location)
                delete_old_steps(location, self.args.save_total_limit, kept=[best], before=self._finish_current_push)

        return finish

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload the files that the Trainer uploads, with the Trainer's names for weights."""
        strategy = self.args.hub_strategy
        if not is_checkpoint(checkpoint_folder) or has_adapters(self.model) or strategy == HubStrategy.END:
            super()._push_from_checkpoint(checkpoint_folder)
            return
        if not self.is_world_process_zero():
            return
        before = self.push_in_progress
        if before is not None and not before.is_done() and not self.args.hub_always_push:
            return
        with temporary_directory("of the files of the Trainer") as name:
            exported = Path(name, Path(checkpoint_folder).name)
            for nested in _export(Path(checkpoint_folder), exported, overwrite=False, context=_ALONE):
                (exported / nested).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(Path(checkpoint_folder, nested), exported / nested)
            self.args.hub_strategy = HubStrategy.EVERY_SAVE  # uploads only the exported model
            try:
                super()._push_from_checkpoint(os.fspath(exported))
            finally:
                self.args.hub_strategy = strategy
        if strategy != HubStrategy.EVERY_SAVE:
            job = HfApi().upload_folder(
                repo_id=self.hub_model_id,
                folder_path=checkpoint_folder,
                path_in_repo="last-checkpoint" if strategy == HubStrategy.CHECKPOINT else exported.name,
                commit_message=f"{exported.name}, checkpoint",
                token=self.args.hub_token,
                run_as_future=True,
                revision=self.args.hub_revision,
            )
            self.push_in_progress.jobs.append(job)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.wait_for_checkpoint()
        limit = self.args.save_total_limit
        self.args.save_total_limit = None  # with 1, the Trainer would delete the last step if it is not the best
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not is_checkpoint(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        check_files(resume_from_checkpoint)
        model = self.model_wrapped if model is None else model
        kind = self._kind()
        target = kind.model(model)
        if isinstance(kind, Adapters):
            stored = ckptcore.metadata(os.path.join(resume_from_checkpoint, "model"), context=_ALONE).abstract
            if isinstance(stored, dict) and not stored.keys().isdisjoint(frozen_names(model)):
                target = model  # the checkpoint is of FSDP, with the base model
        members = _members(resume_from_checkpoint)
        others = {name: value for name, value in kind.others(model).items() if name in members}
        with kind.state_dicts(model):
            ckptcore.load_checkpointables(
                resume_from_checkpoint, into={"model": target, **others}, context=self._context(kind)
            )

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Prepare the model, and load a checkpoint of ckptcore into the engine of DeepSpeed, if there is one."""
        if not self.is_deepspeed_enabled or resume_from_checkpoint is None or not is_checkpoint(resume_from_checkpoint):
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        self._load_from_checkpoint(resume_from_checkpoint)
        self._load_optimizer_and_scheduler(resume_from_checkpoint)
        return prepared

    def _load_best_model(self) -> None:
        if is_checkpoint(self.state.best_model_checkpoint):
            self._load_from_checkpoint(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not is_checkpoint(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        if "optimizer" not in _members(checkpoint):
            raise CheckpointError(
                f"{checkpoint} has no optimizer: it was saved with save_only_model=True. A training cannot resume from "
                "it. Load its model with from_pretrained, and train without resume_from_checkpoint"
            )
        kind = self._kind()
        optimizer = optimizer_to_load(kind, self.model_wrapped, self.optimizer)
        with kind.state_dicts(self.model_wrapped):
            ckptcore.load_checkpointables(
                checkpoint, into={"optimizer": optimizer, **self._scheduler(kind)}, context=self._context(kind)
            )

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not is_checkpoint(checkpoint):
            super()._load_scaler(checkpoint)
        elif "scaler" in _members(checkpoint):
            context = _ALONE if self._has_own_disks() else None
            ckptcore.load_checkpointables(checkpoint, into={"scaler": self.accelerator.scaler}, context=context)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or not is_checkpoint(checkpoint):
            super()._load_rng_state(checkpoint)
        elif self._has_own_disks():
            ckptcore.load_checkpointables(checkpoint, into={"random": self._random_state()}, context=_ALONE)
        elif (processes := _members(checkpoint).processes.get("random", 1)) == self.args.world_size:
            ckptcore.load_checkpointables(checkpoint, into={"random": self._random_state()})
        else:
            logger.warning(
                "%s was saved by %d processes, and this job has %d: random numbers continue from the seed",
                checkpoint,
                processes,
                self.args.world_size,
            )


class _CheckState(TrainerCallback):
    """Checks that the state can be saved, once the Trainer has created the optimizer and the scheduler."""

    def __init__(self, trainer: CheckpointMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check, unless the Trainer saves nothing."""
        if args.save_strategy != SaveStrategy.NO:
            self._warn_of_parameters()
            kind = self._trainer._kind()
            with kind.state_dicts(self._trainer.model_wrapped):
                ckptcore.check_checkpointables(
                    self._trainer._checkpointables(kind), layout=_ONE_FILE, context=kind.context
                )

    def _warn_of_parameters(self) -> None:
        model = self._trainer.model
        if has_adapters(model) and (names := outside_of_adapters(model)):
            logger.warning(
                "%d trainable parameters are in no adapter, such as %s: a resume restores them, but PEFT does not "
                "write them, and PeftModel.from_pretrained opens a checkpoint without them. Name their modules in "
                "modules_to_save of the adapter's config",
                len(names),
                names[0],
            )


def newest_sound(directory: str | os.PathLike[str]) -> str | None:
    """Return the newest checkpoint of a Trainer that is complete and undamaged, for ``resume_from_checkpoint``.

    Reads every byte. Checkpoints of ckptcore are verified by their checksums. A directory that a plain Trainer wrote,
    alone or with PEFT, FSDP or DeepSpeed, must have all parts and the files of all ranks. Weights and states must be
    complete safetensors files, directories of torch.distributed.checkpoint, or zip archives with valid checksums. The
    states of the optimizer, the scheduler and the random generators must either all exist or all be missing
    (``save_only_model``). A damaged directory is skipped, and the reason is logged. In a job, the leader
    decides for all processes.

    Args:
        directory: the ``output_dir`` of the Trainer. It may be missing.

    Returns:
        The path of ``checkpoint-<step>``, or None if there is no checkpoint to resume from.

    Raises:
        CheckpointError: a step that is newer than all sound steps may be damaged, but this is not certain, for example
            because the step has unknown files or cannot be read.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    answers: list[str | CheckpointError | None] = [None]
    if not distributed or torch.distributed.get_rank() == 0:
        try:
            answers = [newest_sound_step(Path(directory))]
        except (CheckpointError, OSError) as error:
            if not distributed:
                raise
            answers = [CheckpointError(str(error))]  # without its cause, which may not be picklable
    if distributed:
        torch.distributed.broadcast_object_list(answers, src=0)
    if isinstance(answers[0], CheckpointError):
        raise answers[0]
    return answers[0]


@own_options("overwrite")
def export_pretrained(
    checkpoint: str | os.PathLike[str], destination: str | os.PathLike[str], *, overwrite: bool = False
) -> None:
    """Copy the model of a checkpoint into a new directory for ``from_pretrained``, verified and committed atomically.

    The directory has ``model.safetensors``, the configuration and the files of the tokenizer or processor.

    Args:
        checkpoint: a directory ``checkpoint-<step>`` that `CheckpointMixin` wrote.
        destination: the new directory.
        overwrite: True to replace it.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or the destination exists.
    """
    directory = Path(checkpoint)
    names = check_files(directory)
    _refuse_adapters(directory, names)
    if nested := [name for name in names if "/" in name]:
        raise CheckpointError(
            f"{directory}: cannot export {nested[0]!r}, because it is in a subdirectory. Load the model and the "
            "tokenizer from the checkpoint with from_pretrained, and call save_pretrained of both"
        )
    _export(directory, destination, overwrite="best-effort" if overwrite else False, context=None)


def _export(
    directory: Path,
    destination: str | os.PathLike[str],
    *,
    overwrite: Literal["best-effort", False],
    context: ckptcore.Context | None,
) -> Sequence[str]:
    """Copy the model and the files next to it. Return the names of the files in subdirectories, which are not copied.

    Raises:
        CheckpointError: see `export_pretrained`.
    """
    names = [name for name in check_files(directory) if name not in (_INDEX, _STATE, "training_args.bin")]
    _refuse_adapters(directory, names)
    files = [directory / name for name in names if "/" not in name]
    ckptcore.copy(
        directory, destination, subtree="model", files=files, layout=_ONE_FILE, overwrite=overwrite, context=context
    )
    return [name for name in names if "/" in name]


def _refuse_adapters(directory: Path, names: Sequence[str]) -> None:
    if any(name.endswith("adapter_config.json") for name in names):
        raise CheckpointError(
            f"{directory} has an adapter of PEFT, and no whole model. Open it with "
            f"PeftModel.from_pretrained(model, {str(directory)!r}), and call save_pretrained of the result"
        )


def _refuse_unsupported(trainer: Any) -> None:
    """Raise an error for a kind of training whose state this mixin does not save."""
    args = trainer.args
    unsupported = {
        "XLA and SageMaker": args.parallel_mode.value in ("tpu", "sagemaker_model_parallel"),
        "PeftMixedModel, which PEFT does not save": type(trainer.model).__name__ == "PeftMixedModel",
        "a model that Transformers sharded when it was loaded (distributed_config)": getattr(
            trainer, "is_distributed_loading_by_transformers", False
        ),
        "save_on_each_node with FSDP or DeepSpeed": args.save_on_each_node
        and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled),
    }
    members = {"model", "optimizer", "scheduler", "random", "scaler"} & set(getattr(trainer.model, "peft_config", {}))
    unsupported[f"an adapter with the name {min(members, default='')!r}, which another part has: rename it"] = bool(
        members
    )
    for name, used in unsupported.items():
        if used:
            raise NotImplementedError(
                f"CheckpointMixin does not support {name}. Remove CheckpointMixin from the bases of "
                f"{type(trainer).__name__}, so that the Trainer writes its own checkpoints"
            )
    if has_adapters(trainer.model) and trainer.is_fsdp_enabled and not getattr(trainer.accelerator, "is_fsdp2", False):
        raise NotImplementedError(
            "CheckpointMixin does not support adapters with FSDP 1: PEFT does not find them in modules that "
            "FullyShardedDataParallel wraps, and saves files without them. Set fsdp_config={'version': 2}"
        )


def _number_of_nodes(args: Any) -> int:
    """Return the number of nodes of the job."""
    if args.world_size == 1:
        return 1
    counts: list[Any] = [None] * args.world_size
    torch.distributed.all_gather_object(counts, args.local_process_index)
    return counts.count(0)


def _step_directory(directory: str, step: int) -> str:
    return os.path.join(directory, f"checkpoint-{step}")


def _members(directory: str) -> Any:
    return ckptcore.metadata(directory).checkpointables
