"""Checkpoints of the Trainer of Hugging Face Transformers, written and read by ckptcore.

`CheckpointMixin` replaces what the Trainer writes at a step and reads when it resumes. `newest_sound` finds the
checkpoint to resume from. `export_pretrained` makes a directory for ``from_pretrained`` from a checkpoint.

A directory ``checkpoint-<step>`` is one checkpoint of ckptcore, committed as a whole:

================================  ====================================================================
``model``                         the weights, ``model/model.safetensors``
``optimizer``, ``scheduler``      their states
``scaler``                        the gradient scaler, if there is one
``random``                        the random generators of each process, as the Trainer writes them
``trainer_state.json``            the Trainer's state, which includes the position in the data
``config.json`` and others        further files that the Trainer writes
``model.safetensors.index.json``  refers to ``model``, so that ``from_pretrained`` opens the directory
================================  ====================================================================
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerState
from transformers.trainer_utils import HubStrategy, SaveStrategy, sort_checkpoints

import ckptcore
from ckptcore.errors import CheckpointError, CorruptCheckpointError
from ckptcore.events import logger_named
from ckptcore.plain_safetensors import open_regular_file
from ckptcore_integrations.added_files import (
    ObjectWithFiles,
    SaveWithFiles,
    check_files,
    digests_of,
    is_checkpoint,
    read_files,
)

if TYPE_CHECKING:
    from ckptcore.results import SaveHandle

    _Trainer = Any
else:
    _Trainer = object
from ckptcore_integrations.own_options import own_options

__all__ = ["CheckpointMixin", "export_pretrained", "newest_sound"]

logger = logger_named("ckptcore.integrations.transformers")

_STATE = "trainer_state.json"
_INDEX = "model.safetensors.index.json"
_WEIGHTS = ("model.safetensors", _INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
_ONE_FILE = ckptcore.SafetensorsLayout(max_file_bytes=sys.maxsize)  # the index names one file of weights
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
    struct.error,
    EOFError,
    RuntimeError,  # it needs a password, or a compression that Python does not have
    ValueError,
)
"""Errors of `zipfile` for damaged archives."""

_RANDOM = re.compile(r"rng_state(_\d+)?\.pth")


@own_options()
class CheckpointMixin(_Trainer):
    """Saves and resumes a ``transformers.Trainer`` with ckptcore: ``class MyTrainer(CheckpointMixin, Trainer)``.

    All arguments of the Trainer keep their meaning: ``save_strategy``, ``save_total_limit``, ``save_only_model``,
    ``load_best_model_at_end``, ``resume_from_checkpoint``. Checkpoints that a plain Trainer wrote are resumed as well.
    In a job of several processes, all must see the same ``output_dir``.

    Attributes:
        save_in_background: True to return from a save once the state is copied, and to write while the training
            continues. A failed save then raises at the next save, or at the end of the training.

    Raises:
        NotImplementedError: by `train`, with DeepSpeed, FSDP, XLA, SageMaker, PEFT, ``save_on_each_node``, or a
            ``hub_strategy`` that uploads checkpoints.
        UnsupportedLeafError: by `train`, before the first step; lists what cannot be saved or restored.
    """

    save_in_background = False
    _pending: Callable[[], None] | None = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Check that the state can be saved, and train. See ``transformers.Trainer.train``."""
        _refuse_unsupported(self)
        check = _CheckState(self)
        self.add_callback(check)
        try:
            return super().train(*args, **kwargs)
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

        files = self._other_files() if self.args.should_save else {}
        if self.args.should_save and os.path.isdir(location) and not is_checkpoint(location):
            shutil.rmtree(location)  # a plain Trainer wrote it, and would write into it again
        save = ckptcore.save_checkpointables_async if self.save_in_background else ckptcore.save_checkpointables
        handle = save(
            location,
            self._checkpointables(),
            layout=_ONE_FILE,
            overwrite=True,
            metadata={"files": digests_of(files)},
            strategy=SaveWithFiles(files=files),
        )
        self._pending = self._after_save(handle, location)
        if not self.save_in_background:
            self.wait_for_checkpoint()

    def _checkpointables(self) -> dict[str, Any]:
        """Return what a checkpoint has besides files."""
        found = {"model": self.model}
        if not self.args.save_only_model:
            found |= {"optimizer": self.optimizer, "scheduler": self.lr_scheduler, "random": self._random_state()}
            if getattr(self.accelerator, "scaler", None) is not None:
                found["scaler"] = self.accelerator.scaler
        return found

    def _random_state(self) -> ObjectWithFiles:
        return ObjectWithFiles(super()._save_rng_state, super()._load_rng_state)

    def _other_files(self) -> Mapping[str, bytes]:
        """Return the Trainer's files other than weights, an index of the weights, and its state."""
        weights = {name: "model/model.safetensors" for name in self.model.state_dict()}
        total = sum(tensor.nbytes for tensor in self.model.state_dict().values())
        with tempfile.TemporaryDirectory(prefix="ckptcore-trainer-") as name:
            directory = Path(name)
            self._save(name, state_dict={})
            for weights_file in _WEIGHTS:
                (directory / weights_file).unlink(missing_ok=True)
            (directory / _INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weights}))
            self.state.save_to_json(os.path.join(name, _STATE))
            return read_files(name)

    def _after_save(self, handle: SaveHandle | None, location: str) -> Callable[[], None]:
        best = self.state.best_model_checkpoint

        def finish() -> None:
            if handle is not None:
                handle.result()
            if self.args.should_save:
                _delete_old(location, best, self.args.save_total_limit)

        return finish

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.wait_for_checkpoint()
        return super()._finalize_training(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not is_checkpoint(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        check_files(resume_from_checkpoint)
        ckptcore.load_checkpointables(resume_from_checkpoint, into={"model": self.model if model is None else model})

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
        ckptcore.load_checkpointables(checkpoint, into={"optimizer": self.optimizer, "scheduler": self.lr_scheduler})

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not is_checkpoint(checkpoint):
            super()._load_scaler(checkpoint)
        elif "scaler" in _members(checkpoint):
            ckptcore.load_checkpointables(checkpoint, into={"scaler": self.accelerator.scaler})

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or not is_checkpoint(checkpoint):
            super()._load_rng_state(checkpoint)
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
    """Checks that the state can be saved, when the Trainer has made the optimizer and the scheduler."""

    def __init__(self, trainer: CheckpointMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check, unless the Trainer saves nothing."""
        if args.save_strategy != SaveStrategy.NO:
            ckptcore.check_checkpointables(self._trainer._checkpointables(), layout=_ONE_FILE)


def newest_sound(directory: str | os.PathLike[str]) -> str | None:
    """Return the newest checkpoint of a Trainer that is complete and undamaged, for ``resume_from_checkpoint``.

    Reads every byte. Checkpoints of ckptcore are verified by their checksums. Of a directory that a plain Trainer
    wrote, the weights must be complete safetensors files or zip archives with valid checksums, and so must the states
    of the optimizer, the scheduler and the random generators, which are either all there or all missing
    (``save_only_model``). Each directory that is skipped is logged, with the reason. In a job, the leader decides for
    all processes.

    Args:
        directory: the ``output_dir`` of the Trainer. It may be missing.

    Returns:
        The path of ``checkpoint-<step>``, or None if there is none to resume from.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    found: list[str | None] = [None]
    if not distributed or torch.distributed.get_rank() == 0:
        found = [next(_sound(Path(directory)), None)]
    if distributed:
        torch.distributed.broadcast_object_list(found, src=0)
    return found[0]


@own_options("overwrite")
def export_pretrained(
    checkpoint: str | os.PathLike[str], destination: str | os.PathLike[str], *, overwrite: bool = False
) -> None:
    """Copy the model of a checkpoint into a new directory for ``from_pretrained``, verified and committed atomically.

    It has ``model.safetensors``, the configuration and the files of the tokenizer or processor.

    Args:
        checkpoint: a directory ``checkpoint-<step>`` that `CheckpointMixin` wrote.
        destination: the new directory.
        overwrite: True to replace it.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or the destination exists.
    """
    directory = Path(checkpoint)
    names = [name for name in check_files(directory) if name not in (_INDEX, _STATE, "training_args.bin")]
    nested = [name for name in names if "/" in name]
    if nested:
        raise CheckpointError(
            f"{directory}: cannot export {nested[0]!r}, because it is in a subdirectory. Load the model and the "
            "tokenizer from the checkpoint with from_pretrained, and call save_pretrained of both"
        )
    ckptcore.copy(
        directory, destination, subtree="model", files=[directory / name for name in names], overwrite=overwrite
    )


def _refuse_unsupported(trainer: Any) -> None:
    """Raise an error for a kind of training whose state this mixin does not save."""
    args = trainer.args
    unsupported = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": trainer.is_fsdp_enabled,
        "XLA and SageMaker": args.parallel_mode.value in ("tpu", "sagemaker_model_parallel"),
        "PEFT": hasattr(trainer.model, "peft_config") or getattr(trainer.model, "_hf_peft_config_loaded", False),
        "save_on_each_node (all processes must see one output_dir)": args.save_on_each_node,
        f"hub_strategy={args.hub_strategy}": args.push_to_hub and args.hub_strategy != HubStrategy.END,
    }
    for name, used in unsupported.items():
        if used:
            raise NotImplementedError(
                f"CheckpointMixin does not support {name}. Remove CheckpointMixin from the bases of "
                f"{type(trainer).__name__}, so that the Trainer writes its own checkpoints"
            )


def _delete_old(saved: str, best: str | None, limit: int | None) -> None:
    """Delete the checkpoints beyond ``save_total_limit``, in the Trainer's order, except `saved` and the best one.

    The Trainer's own function keeps the one with the newest time instead of `saved`. Clocks may be set back, and it
    goes by the number if the times are close: then a run that was set back would lose each step that it saves.
    """
    if limit is not None and limit > 0:
        found = sort_checkpoints(os.path.dirname(saved), use_mtime=True)
        protected = {str(Path(kept)) for kept in (saved, best) if kept is not None}.intersection(found)
        others = [directory for directory in found if directory not in protected]
        for directory in others[: max(len(found) - max(limit, len(protected)), 0)]:
            shutil.rmtree(directory, ignore_errors=True)


def _step_directory(directory: str, step: int) -> str:
    return os.path.join(directory, f"checkpoint-{step}")


def _members(directory: str) -> Any:
    return ckptcore.metadata(directory).checkpointables


def _sound(directory: Path) -> Iterator[str]:
    """Yield the checkpoints that are sound, newest first."""
    names = os.listdir(directory) if directory.is_dir() else []
    steps = {int(found[1]): name for name in names if (found := re.fullmatch(r"checkpoint-(\d+)", name))}
    for step in sorted(steps, reverse=True):
        path = directory / steps[step]
        if (problem := _problem(path, step)) is None:
            yield str(path)
        else:
            logger.warning("%s is skipped: %s", path, problem)


def _problem(path: Path, step: int) -> str | None:
    """Return why a checkpoint cannot be resumed from, or None."""
    try:
        if is_checkpoint(path):
            check_files(path)
            report = ckptcore.verify(path)
            return None if report.ok else report.problems[0].message
        return _problem_of_trainer(path, step)
    except (CheckpointError, OSError, ValueError) as error:
        return str(error)


def _problem_of_trainer(path: Path, step: int) -> str | None:
    """The same for a directory that a plain Trainer wrote."""
    if _document(path / _STATE).get("global_step") != step:
        return f"{_STATE} is not of step {step}"
    names = os.listdir(path)
    shards = {shard for name in names if name.endswith(".index.json") for shard in _shards(path / name)}
    weights = {name for name in names if re.fullmatch(r"(model|adapter_model).*\.safetensors|\w+_model.*\.bin", name)}
    if not weights or not shards <= weights:
        return "weights are missing"
    states = ["optimizer.pt" in names, "scheduler.pt" in names, any(map(_RANDOM.fullmatch, names))]
    if any(states) and not all(states):
        return "the state of the optimizer, the scheduler or the random generators is missing"
    for name in names:
        if name.endswith(".safetensors"):
            ckptcore.metadata(path / name)  # checks that the header describes all bytes
        elif name.endswith((".pt", ".pth", ".bin")):
            _check_zip(path / name)
    return None


def _check_zip(path: Path) -> None:
    """Raise CorruptCheckpointError unless all members of an archive have valid checksums.

    Reads no more bytes than the file has: members are not compressed, and do not share bytes.
    """
    try:
        with open_regular_file(path) as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise CorruptCheckpointError(f"{path.name} has compressed members, which torch.save does not write")
            if sum([member.file_size for member in members]) > os.fstat(file.fileno()).st_size:
                raise CorruptCheckpointError(f"{path.name} has members that are together longer than the file")
            broken = archive.testzip()
    except _ZIP_ERRORS as error:
        raise CorruptCheckpointError(f"{path.name} is not an intact zip archive: {error!r}") from error
    if broken is not None:
        raise CorruptCheckpointError(f"{path.name} is damaged in {broken}")


def _shards(index: Path) -> set[str]:
    """Return the names of the files in an index of weights."""
    names = _document(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise CorruptCheckpointError(f"{index.name} does not name the files of the weights")
    return set(names.values())


def _document(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    try:
        with open_regular_file(path) as file:
            found = json.load(file)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CorruptCheckpointError(f"{path.name} is not a JSON object")
    return found
