"""Kinds of training: they decide how a model and its optimizer are saved and loaded."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from ckptcore_torch.modules import ModuleHandler
from ckptcore_torch.named_optimizers import NamedOptimizer

from ckptcore import Context
from ckptcore_integrations.adapters import adapter_tensors, is_data_parallel


class TrainingKind(Protocol):
    """A kind of training, such as FSDP. All processes call the methods together.

    Attributes:
        is_whole: True if each process has all weights of a model.
        context: the Context to save and load with.
    """

    is_whole: bool
    context: Context | None

    def model(self, model: Any) -> object:
        """Return the checkpointable of a model that Accelerate prepared."""

    def optimizer(self, model: Any, optimizer: Any) -> object:
        """Return the checkpointable of the optimizer of a prepared model."""

    def others(self, model: Any) -> dict[str, object]:
        """Return other checkpointables of a prepared model, by name."""

    def schedulers(self, schedulers: Sequence[Any]) -> list[Any]:
        """Return the schedulers that are not part of another checkpointable."""

    def sizes_of_weights(self, model: Any) -> Mapping[str, int] | None:
        """Return the sizes of the weights in bytes, by name; None if they are not saved as whole arrays."""

    def state_dicts(self, *models: Any) -> AbstractContextManager[None]:
        """Return a context manager for saving and loading the checkpointables."""


class _WithoutOthers:
    """The methods of kinds whose state is the model, the optimizer and the scheduler."""

    context: Context | None = None

    def others(self, model: Any) -> dict[str, object]:
        """Return nothing."""
        return {}

    def schedulers(self, schedulers: Sequence[Any]) -> list[Any]:
        """Return all schedulers."""
        return list(schedulers)


class Replicated(_WithoutOthers):
    """One process, or DistributedDataParallel: each process has the whole model."""

    is_whole = True

    def model(self, model: Any) -> object:
        """Return the model."""
        return model

    def optimizer(self, model: Any, optimizer: Any) -> object:
        """Return the optimizer."""
        return optimizer

    def sizes_of_weights(self, model: Any) -> Mapping[str, int] | None:
        """Return the sizes of all weights, under the names of the plain model."""
        weights: Any = ModuleHandler().flatten(model)
        return {name: tensor.nbytes for name, tensor in weights.items()}

    def state_dicts(self, *models: Any) -> AbstractContextManager[None]:
        """Return a context manager that changes nothing."""
        return nullcontext()


class Adapters(Replicated):
    """A model with adapters, whole in each process.

    PEFT writes files of the adapters, which `PeftModel.from_pretrained` opens. These files lack trainable parameters
    outside of adapters, prompt encoders and running statistics, and may have another dtype. So a resume does not read
    them. It reads the tensors of `adapter_tensors`, which are saved too.
    """

    def model(self, model: Any) -> object:
        """Return the tensors of `adapter_tensors`."""
        return adapter_tensors(getattr(model, "module", model) if is_data_parallel(model) else model)

    def sizes_of_weights(self, model: Any) -> Mapping[str, int] | None:
        """Return None: PEFT needs no index of weights."""
        return None


class Sharded(_WithoutOthers):
    """FSDP 1 and 2, and other models with DTensors: each process saves and loads its shards.

    The optimizer is saved by the names of the parameters, so that any number of processes can load it. With numbers
    instead of names, a parameter that has no state, because it had no gradient, could be confused with another
    parameter.
    """

    is_whole = False

    def model(self, model: Any) -> object:
        """Return the model."""
        return model

    def optimizer(self, model: Any, optimizer: Any) -> object:
        """Return the optimizer together with the model, which knows the names of the parameters."""
        return NamedOptimizer(model, getattr(optimizer, "optimizer", optimizer))

    def sizes_of_weights(self, model: Any) -> Mapping[str, int] | None:
        """Return None."""
        return None

    @contextmanager
    def state_dicts(self, *models: Any) -> Iterator[None]:
        """Make FSDP 1 return sharded state dicts. Full ones, which Accelerate may choose, need more memory."""
        kind = _fsdp()
        with ExitStack() as stack:
            for model in models:
                if kind is not None and kind.fsdp_modules(model):
                    from torch.distributed.fsdp import StateDictType  # programs that use FSDP 1 have imported it

                    stack.enter_context(warnings.catch_warnings())
                    warnings.filterwarnings("ignore", message="FSDP.state_dict_type", category=FutureWarning)
                    stack.enter_context(kind.state_dict_type(model, StateDictType.SHARDED_STATE_DICT))
            yield


def training_kind(*models: torch.nn.Module, gather_weights: bool = False) -> TrainingKind:
    """Return the kind of training of prepared models. Looks at their modules and parameters, not at the configuration.

    The configuration can be wrong: Accelerate uses DistributedDataParallel if it does not support the configured kind.

    Args:
        models: the models.
        gather_weights: True to save whole weights, if the configuration of DeepSpeed requests it.
    """
    engine = sys.modules.get("deepspeed.runtime.engine")
    if engine is not None and any(isinstance(model, engine.DeepSpeedEngine) for model in models):
        from ckptcore_integrations.deepspeed import Engines  # programs that use DeepSpeed have imported it

        return Engines(gather_weights=gather_weights)
    kind = _fsdp()
    for model in models:
        if kind is not None and kind.fsdp_modules(model):
            return Sharded()
        if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):  # a DTensor
            return Sharded()
    return Replicated()


def optimizer_to_load(kind: TrainingKind, model: Any, optimizer: Any) -> object:
    """Return the checkpointable to load an optimizer into. It accepts states by number and by name.

    So one process can load a checkpoint that FSDP saved.
    """
    objects = kind.optimizer(model, optimizer)
    own = getattr(optimizer, "optimizer", optimizer)
    if model is not None and kind.is_whole and isinstance(own, torch.optim.Optimizer):
        return NamedOptimizer(model, own)
    return objects


def _fsdp() -> Any:
    """Return the class of FSDP 1, or None if its module is not imported. No model uses FSDP 1 then."""
    module = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return getattr(module, "FullyShardedDataParallel", None)
