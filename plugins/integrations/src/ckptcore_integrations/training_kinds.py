"""Kinds of training, such as of adapters: what of a model and its optimizer a checkpoint has, and how it is loaded."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from ckptcore_torch.modules import ModuleHandler
from ckptcore_torch.named_optimizers import NamedOptimizer
from ckptcore_torch.names import plain_module_names, plain_names
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from ckptcore import Context


def has_adapters(model: torch.nn.Module) -> bool:
    """Return True for a `PeftModel`, and for a model of Transformers after `add_adapter`."""
    return hasattr(model, "peft_config") or bool(getattr(model, "_hf_peft_config_loaded", False))


def is_data_parallel(model: torch.nn.Module) -> bool:
    """Return True if a module only distributes another one, its ``module``."""
    return isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel)


def adapter_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what the training of a model may change, by plain names. The tensors are not copied.

    This is every trainable parameter, every tensor of every adapter, also of those that are not active, and the running
    statistics of normalizations.
    """
    state = model.state_dict()
    plain = plain_names(model, state)
    return {plain[name]: state[name] for name in _names(model, state)}


def _names(model: torch.nn.Module, state: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names in a state dict of what the training may change."""
    parts = set(_parts(model))
    named = model.named_parameters(remove_duplicate=False)
    trainable = set(plain_names(model, [name for name, parameter in named if parameter.requires_grad]).values())
    for name, plain in plain_names(model, state).items():
        if isinstance(state[name], torch.Tensor) and (plain in trainable or _is_below(plain, parts)):
            yield name


def frozen_names(model: torch.nn.Module) -> set[str]:
    """Return the plain names in a state dict of what the training does not change: the base model."""
    state = model.state_dict()
    plain = plain_names(model, state)
    return set(plain.values()).difference(plain[name] for name in _names(model, state))


def outside_of_adapters(model: torch.nn.Module) -> list[str]:
    """Return the names of trainable parameters that are in no adapter: PEFT does not write them."""
    parts = set(_parts(model))
    named = model.named_parameters(remove_duplicate=False)
    names = plain_names(model, [name for name, parameter in named if parameter.requires_grad]).values()
    return [name for name in names if not _is_below(name, parts)]


def gathered_adapters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return `adapter_tensors` of a model under FSDP as whole tensors on the CPU. All processes call it.

    Call it in the context of `Sharded.state_dicts`.
    """
    own = model.state_dict()
    plain = plain_names(model, own)
    return {plain[name]: _whole(own[name]) for name in _names(model, own)}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a DTensor, in every process."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu()


def _is_below(name: str, parts: Collection[str]) -> bool:
    """Return True if a name is one of the parts, or is in one of them."""
    segments = name.split(".")
    return any(".".join(segments[:count]) in parts for count in range(1, len(segments) + 1))


def _parts(model: torch.nn.Module) -> Iterator[str]:
    """Yield the plain names of adapters and running statistics."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # installed, if a model has adapters
    from peft.utils.other import AuxiliaryTrainingWrapper

    modules = dict(model.named_modules())
    plain_of = plain_module_names(model, modules)
    for name, module in modules.items():
        plain = plain_of[name]
        own = f"{plain}." if plain else ""
        if isinstance(module, BaseTunerLayer):
            yield from (f"{own}{part}" for part in (*module.adapter_layer_names, *module.other_param_names))
        elif isinstance(module, AuxiliaryTrainingWrapper):
            yield from (f"{own}{part}" for part, _ in module.named_children() if part != "original_module")
        elif isinstance(module, _NormBase):
            yield from (f"{own}{buffer}" for buffer, _ in module.named_buffers(recurse=False))
        elif plain == "prompt_encoder":
            yield plain


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
        """Return the checkpointable of the optimizer of such a model."""

    def others(self, model: Any) -> dict[str, object]:
        """Return further checkpointables of such a model, by name."""

    def schedulers(self, schedulers: Sequence[Any]) -> list[Any]:
        """Return the schedulers that none of these checkpointables has."""

    def sizes_of_weights(self, model: Any) -> Mapping[str, int] | None:
        """Return the sizes of the weights in bytes, by name; None if they are not saved as whole arrays."""

    def state_dicts(self, *models: Any) -> AbstractContextManager[None]:
        """Return a context in which these checkpointables are saved and loaded."""


class _WithoutOthers:
    """The methods of kinds whose state is the model, the optimizer and the scheduler."""

    context: Context | None = None

    def others(self, model: Any) -> dict[str, object]:
        """Return nothing."""
        return {}

    def schedulers(self, schedulers: Sequence[Any]) -> list[Any]:
        """Return all of them."""
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
        """Return a context that changes nothing."""
        return nullcontext()


class Adapters(Replicated):
    """A model with adapters, whole in each process.

    PEFT writes files of the adapters, which `PeftModel.from_pretrained` opens. They have no trainable parameters
    outside of adapters, no prompt encoders and no running statistics, and may have another dtype. So a resume does not
    read them, but the tensors that `adapter_tensors` returns.
    """

    def model(self, model: Any) -> object:
        """Return the tensors."""
        return adapter_tensors(getattr(model, "module", model) if is_data_parallel(model) else model)

    def sizes_of_weights(self, model: Any) -> Mapping[str, int] | None:
        """Return None: PEFT needs no index of weights."""
        return None


class Sharded(_WithoutOthers):
    """FSDP 1 and 2, and other models of DTensors: each process saves and loads its shards.

    The optimizer is saved by the names of the parameters, so that any number of processes can load it, and so that
    parameters without a gradient, which have no state, are not confused with others.
    """

    is_whole = False

    def model(self, model: Any) -> object:
        """Return the model."""
        return model

    def optimizer(self, model: Any, optimizer: Any) -> object:
        """Return the optimizer with the model, which has the names of its parameters."""
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
                    from torch.distributed.fsdp import StateDictType  # imported already, by those who use FSDP 1

                    stack.enter_context(warnings.catch_warnings())
                    warnings.filterwarnings("ignore", message="FSDP.state_dict_type", category=FutureWarning)
                    stack.enter_context(kind.state_dict_type(model, StateDictType.SHARDED_STATE_DICT))
            yield


def training_kind(*models: torch.nn.Module, gather_weights: bool = False) -> TrainingKind:
    """Return the kind of training of prepared models: by their modules and parameters, not by what was configured.

    Accelerate trains with DistributedDataParallel where it cannot do what was configured.

    Args:
        models: the models.
        gather_weights: True to save whole weights, where the configuration of DeepSpeed asks for it.
    """
    engine = sys.modules.get("deepspeed.runtime.engine")
    if engine is not None and any(isinstance(model, engine.DeepSpeedEngine) for model in models):
        from ckptcore_integrations.deepspeed import Engines  # DeepSpeed is imported already, by those who use it

        return Engines(gather_weights=gather_weights)
    kind = _fsdp()
    for model in models:
        if kind is not None and kind.fsdp_modules(model):
            return Sharded()
        if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):  # a DTensor
            return Sharded()
    return Replicated()


def optimizer_to_load(kind: TrainingKind, model: Any, optimizer: Any) -> object:
    """Return the checkpointable of an optimizer to load into, which takes states by numbers and by names.

    So one process can load what FSDP saved.
    """
    objects = kind.optimizer(model, optimizer)
    own = getattr(optimizer, "optimizer", optimizer)
    if model is not None and kind.is_whole and isinstance(own, torch.optim.Optimizer):
        return NamedOptimizer(model, own)
    return objects


def _fsdp() -> Any:
    """Return the class of FSDP 1. A model has it only if its module was imported."""
    module = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return getattr(module, "FullyShardedDataParallel", None)
