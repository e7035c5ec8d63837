"""TorchTitan: a checkpoint manager that saves and loads the steps of a Trainer with ckptcore.

`CkptcoreManager` is a `BaseCheckpointManager`: set ``checkpoint=CkptcoreManager.Config(...)`` in the configuration of
the Trainer. Steps are directories ``step-<number>`` in the format of torch.distributed.checkpoint, with the names that
TorchTitan's own manager uses, so that each manager can continue the other's runs.
"""

from __future__ import annotations

import contextlib
import pickletools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpointer import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger

import ckptcore
from ckptcore import Checkpointer, CheckpointReader, Context, Matching
from ckptcore.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, UnsupportedLeafError
from ckptcore.policies import LatestN
from ckptcore.redaction import redacted_location
from ckptcore.results import SaveHandle
from ckptcore.step_names import StepNameFormat, StepNames
from ckptcore_integrations.own_options import own_options

__all__ = ["CkptcoreManager"]

_NAMES: Final = StepNames(StepNameFormat("step-"), [StepNameFormat("step-", None)])

_PART: Final = Matching(unexpected="ignore")
"""Ignore entries of other ranks: the position in their data, and their stages of a pipeline."""

_CALLS: Final = ("GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID")
"""Pickle opcodes that import an object. A pickle without them runs no code."""


@own_options()
class CkptcoreManager(BaseCheckpointManager):
    """Saves the steps of a Trainer of TorchTitan, and resumes from the newest valid one.

    All ranks save one checkpoint together. A save returns once the state is copied, and writes while training
    continues. The error of a failed save is raised by the next save, or when the Trainer is closed. Old steps beyond
    ``keep_latest_k`` are deleted after a commit. The newest valid step is never deleted. Loading runs no code from a
    checkpoint.

    Attributes:
        context: options, such as those of storages, for all managers of the class. Set it in a subclass with its
            own ``Config``. It is not in the configuration, because TorchTitan sends the configuration to its loggers.
    """

    context: Context | None = None

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """The options of TorchTitan's managers.

        Attributes:
            async_mode: "async": write in the background, from a copy. "disabled": return once a step is committed.
            layout: the on-disk format of arrays. TorchTitan's own manager reads "dcp".

        Raises:
            ValueError: `async_mode` or `layout` is unknown.
        """

        async_mode: Literal["disabled", "async"] = "async"
        layout: Literal["dcp", "safetensors"] = "dcp"

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            if self.async_mode not in ("disabled", "async"):
                raise ValueError(
                    f"checkpoint.async_mode={self.async_mode!r}: expected 'disabled' or 'async', which copies the "
                    "state before it returns"
                )
            if self.layout not in ("dcp", "safetensors"):
                raise ValueError(f"checkpoint.layout={self.layout!r}: expected 'dcp' or 'safetensors'")

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        """Open the directory of the run, and become its owner unless ``load_only`` is set. The Trainer calls this.

        Raises:
            ValueError: ``last_save_in_hf`` is set, and the model has no adapter for names of Hugging Face.
            DirectoryInUseError: another job writes to the directory.
        """
        self.enable = config.enable
        self.save_future: SaveHandle | None = None
        if not self.enable:
            return
        if config.last_save_in_hf and sd_adapter is None:
            raise ValueError(
                "checkpoint.last_save_in_hf=True: the model has no state_dict_adapter, which names its weights for "
                "Hugging Face. Set last_save_in_hf=False"
            )
        self.config = config
        self.folder = filesystem.join(base_folder, config.folder)
        self.sd_adapter = sd_adapter
        self.states = states
        self.states.update(
            {
                MODEL: ModelWrapper(model_parts),
                OPTIMIZER: optimizers,
                DATALOADER: dataloader,
                LR_SCHEDULER: lr_schedulers,
            }
        )
        self._writer: Checkpointer | None = None
        self._reader: Checkpointer | CheckpointReader
        if config.load_only:
            self._reader = CheckpointReader(self.folder, step_names=_NAMES, context=self.context)
        else:
            self._reader = self._writer = Checkpointer(
                self.folder,
                preservation_policy=LatestN(config.keep_latest_k) if config.keep_latest_k else None,
                step_names=_NAMES,
                layout=config.layout,
                if_in_use="take over",  # a running job keeps the directory if it renews a lease
                other_files=True,  # as TorchTitan does
                context=self.context,
            )
        logger.info(f"Checkpoints are loaded from and saved to {redacted_location(self.folder)}.")

    # --- saving -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:  # a method of the base class
        """Save a step if it is due. Return True if it is saved, or being saved."""
        writer = self._writer
        if writer is None or not self._is_due(curr_step, last_step=last_step):
            return False
        self.maybe_wait_for_saving()
        if last_step and self.config.last_save_model_only:
            self._save_weights(writer, curr_step)
            return True
        self.save_future = writer.save(curr_step, self._state(self.states), overwrite="best-effort")
        if last_step or self.config.async_mode == "disabled":
            self.maybe_wait_for_saving()
        return True

    def _is_due(self, step: int, *, last_step: bool) -> bool:
        first = step == 1 and self.config.enable_first_step_checkpoint
        return first or last_step or step % self.config.interval == 0

    def _save_weights(self, writer: Checkpointer, step: int) -> None:
        """Save the weights of the model in the dtype for export, for a run that has ended."""
        dtype = TORCH_DTYPE_MAP[self.config.export_dtype]
        weights = {
            name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in self.states[MODEL].state_dict().items()
        }
        if not self.config.last_save_in_hf:
            writer.save_blocking(step, weights, overwrite="best-effort")
            return
        # Ranks hold shards, but files for Hugging Face have whole tensors. A killed process may leave both directories.
        shards = filesystem.join(self.folder, f"shards-of-step-{step}")
        ckptcore.save(
            shards, self.sd_adapter.to_hf(weights), layout="dcp", overwrite="with-other-files", context=self.context
        )
        exported = filesystem.join(self.folder, f"step-{step}")
        ckptcore.copy(shards, exported, subtree=(), overwrite="with-other-files", context=self.context)
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            ckptcore.delete(shards, other_files=True, context=self.context)

    def _state(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """Return the states of objects under TorchTitan's names. Names of weights have no prefix ``model``.

        Raises:
            UnsupportedLeafError: the position of the data is a pickle with code.
        """
        state = {name: _state_of(value) for name, value in objects.items() if name != MODEL}
        self._check_position(state)
        return {**state, **objects[MODEL].state_dict()}

    def _check(self, writer: Checkpointer) -> None:
        """Check that the state can be saved. Checks the optimizers directly: their container would make a step."""
        state = self._state({name: value for name, value in self.states.items() if name != OPTIMIZER})
        writer.check({**state, OPTIMIZER: list(self.states[OPTIMIZER])})

    def _check_position(self, state: Mapping[str, Any]) -> None:
        """Refuse a pickle whose code TorchTitan's data loader would run."""
        if not isinstance(self.states[DATALOADER], ParallelAwareDataloader):
            return
        for name, value in state.get(DATALOADER, {}).items():
            if isinstance(value, bytes) and (called := _called_in(value)):
                raise UnsupportedLeafError(
                    f"state['dataloader'][{name!r}] is a pickle that imports {called}. Loading never runs code. Let "
                    "state_dict of the dataset return only numbers, text, lists and dicts. To load this checkpoint "
                    "without the position of the data: checkpoint.exclude_from_loading=['dataloader']"
                )

    # --- loading ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        """Load a step, or the newest valid one. Without steps, load the initial checkpoint, if there is one.

        The Trainer calls this before each training, so it first checks that the state can be saved.

        Raises:
            CheckpointNotFoundError: the step, or the initial checkpoint, does not exist.
            TreeMismatchError: the checkpoint lacks a part of the state.
            UnsupportedLeafError: lists what cannot be saved or restored.
        """
        if self._writer is not None:
            self._check(self._writer)
        self._reader.reload()
        expected = self._reader.latest if step == -1 else step
        if expected is None:
            return self._load_initial()
        if expected not in self._reader.steps:
            raise CheckpointNotFoundError(
                f"checkpoint.load_step={step}: {self.folder} has no such step. Expected one of "
                f"{', '.join(map(str, self._reader.steps)) or '(none)'}"
            )
        objects = self._objects_to_load(only_model=expected == 0)  # a seed checkpoint
        with contextlib.suppress(CorruptCheckpointError):  # then the step before it is loaded
            _forget_states_not_saved(objects, self._reader.metadata(expected).abstract)
        state = self._state(objects)
        self._reader.load_into(state, step=None if step == -1 else step, matching=_PART)
        for skipped in self._reader.skipped_steps:
            logger.warning(f"Step {skipped.step} was skipped: {skipped.reason}")
        self._restore(objects, state)
        logger.info(f"Loaded step {self._reader.restored_step} of {redacted_location(self.folder)}.")
        return True

    def _load_initial(self) -> bool:
        """Load the checkpoint that the configuration names for the start of a run."""
        config, path = self.config, self.config.initial_load_path
        if config.initial_load_in_hf:
            path = path or getattr(self.sd_adapter, "hf_assets_path", None)
            if self.sd_adapter is None or not path or not filesystem.isdir(path):
                raise CheckpointNotFoundError(
                    f"checkpoint.initial_load_in_hf=True: cannot load {path}. The model needs a state_dict_adapter, "
                    "and checkpoint.initial_load_path or hf_assets_path must be a directory"
                )
            weights = self.sd_adapter.to_hf(self.states[MODEL].state_dict())
            reader = self.sd_adapter.get_hf_storage_reader(path, config.initial_load_in_hf_quantized)
            load(weights, storage_reader=reader)  # the model's reader may dequantize weights
            self.states[MODEL].load_state_dict(self.sd_adapter.from_hf(weights))
        elif path:
            objects = self._objects_to_load(only_model=config.initial_load_model_only)
            _forget_states_not_saved(objects, ckptcore.metadata(path, context=self.context).abstract)
            state = self._state(objects)
            ckptcore.load_into(path, state, matching=_PART, context=self.context)
            self._restore(objects, state)
        else:
            logger.info("There is no checkpoint: the run starts at step 0.")
            return False
        logger.info(f"Loaded {redacted_location(path)}.")
        return True

    def _objects_to_load(self, *, only_model: bool) -> dict[str, Any]:
        excluded: Collection[str] = self.config.exclude_from_loading
        others = [name for name in self.states if name != MODEL]  # TorchTitan refuses to exclude the model
        if unknown := [name for name in excluded if name not in others]:
            raise ValueError(
                f"checkpoint.exclude_from_loading has {unknown[0]!r}: expected names of {', '.join(others)}"
            )
        if only_model:
            return {MODEL: self.states[MODEL]}
        return {name: value for name, value in self.states.items() if name not in excluded}

    def _restore(self, objects: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Restore the loaded states of objects. Tensors were already loaded in place."""
        self._check_position(state)
        for name, value in objects.items():
            if name == MODEL:
                value.load_state_dict({key: state[key] for key in value.state_dict()})
            elif isinstance(value, Stateful):
                value.load_state_dict(state[name])

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing, because a save returns after it has copied the state."""

    def _wait_for_saving(self) -> None:
        """Wait for the running save, and raise its error."""
        running, self.save_future = self.save_future, None
        assert running is not None
        running.result()

    def _close(self) -> None:
        """Wait for saves and deletions, raise their errors, and release the directory."""
        if hasattr(self, "_reader"):
            self._reader.close()


def _state_of(value: Any) -> Any:
    return value.state_dict() if isinstance(value, Stateful) else value


def _forget_states_not_saved(objects: Mapping[str, Any], stored: Any) -> None:
    """Remove the states of parameters that have no stored state, because they had no gradient before the save.

    To create states to load into, TorchTitan's container makes a step with zeros.
    """
    optimizers = objects.get(OPTIMIZER)
    if optimizers is None or not isinstance(saved := stored.get(OPTIMIZER), Mapping):
        return
    optimizers.state_dict()  # creates the states
    parts = [key.split(".") for key in saved if key.startswith("state.")]
    names = {".".join(key[1:count]) for key in parts for count in range(2, len(key))}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if name not in names:
                    optimizer.state.pop(parameter, None)


def _called_in(pickled: bytes) -> str | None:
    """Return the name of an import in a pickle, or None if the pickle only has values.

    Raises:
        CheckpointError: it is not a pickle.
    """
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.name in _CALLS:
                return str(argument) if argument is not None else "a name"
    except ValueError as error:
        raise CheckpointError(f"state['dataloader'] is damaged: {error}") from error
    return None
