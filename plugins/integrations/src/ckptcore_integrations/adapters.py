"""Models with PEFT adapters. Their checkpoints have the trained tensors, without the frozen base model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from ckptcore_torch.names import plain_module_names, plain_names
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase


def has_adapters(model: torch.nn.Module) -> bool:
    """Return True for a `PeftModel`, and for a model of Transformers after `add_adapter`."""
    return hasattr(model, "peft_config") or bool(getattr(model, "_hf_peft_config_loaded", False))


def is_data_parallel(model: torch.nn.Module) -> bool:
    """Return True if a module only wraps another module to train it on several devices."""
    return isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel)


def adapter_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that the training may change, by plain names. The tensors are not copied.

    The result has the trainable parameters, all tensors of active and inactive adapters, and the running statistics of
    normalizations.
    """
    state = model.state_dict()
    plain = plain_names(model, state)
    return {plain[name]: state[name] for name in _names(model, state)}


def _names(model: torch.nn.Module, state: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of those tensors of a state dict that the training may change."""
    parts = set(_parts(model))
    named = model.named_parameters(remove_duplicate=False)
    trainable = set(plain_names(model, [name for name, parameter in named if parameter.requires_grad]).values())
    for name, plain in plain_names(model, state).items():
        if isinstance(state[name], torch.Tensor) and (plain in trainable or _is_below(plain, parts)):
            yield name


def frozen_names(model: torch.nn.Module) -> set[str]:
    """Return the plain names of the tensors that the training does not change: the base model."""
    state = model.state_dict()
    plain = plain_names(model, state)
    return set(plain.values()).difference(plain[name] for name in _names(model, state))


def outside_of_adapters(model: torch.nn.Module) -> list[str]:
    """Return the names of trainable parameters outside of adapters, which PEFT does not write."""
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
    from peft.tuners.tuners_utils import BaseTunerLayer  # PEFT is installed if a model has adapters
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
