"""`NamedState` of an optimizer of a model under FSDP1, `torch.distributed.fsdp.FullyShardedDataParallel`.

Such an optimizer has flat parameters, or slices of them. Only FSDP can convert its state to the
original parameters: to ShardedTensors, or to DTensors if it has a mesh.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

from ckptcore.model import PLAIN_ARRAY, AbstractArray
from ckptcore_torch.abstracts import abstract_state_like, abstract_tensor
from ckptcore_torch.conversions import encoding_of_stored
from ckptcore_torch.names import plain_names
from ckptcore_torch.optimizer_names import NamedState
from ckptcore_torch.optimizers import OptimizerHandler
from ckptcore_torch.sharded_tensors import sharded_like


def fsdp_named_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> NamedState:
    """Return the state by names. See `ckptcore_torch.optimizer_names.named_state`.

    All processes of the model must call this function and `NamedState.restore` together, because
    FSDP exchanges data between the processes in both calls.
    """
    with _sharded(model):
        state = FSDP.optim_state_dict(model, optimizer)
    own_names = [name for group in state["param_groups"] for name in group["params"]]
    plain = plain_names(model, own_names)
    own_name = {name: own for own, name in plain.items()}

    def restore(slots: Mapping[Any, Any], groups: list[dict[str, Any]]) -> None:
        named = {
            "state": {own_name.get(key, key): value for key, value in slots.items()},
            "param_groups": [{**group, "params": [own_name[name] for name in group["params"]]} for group in groups],
        }
        with _sharded(model):
            numbered = FSDP.optim_state_dict_to_load(model, optimizer, named)
        OptimizerHandler().restore(optimizer, numbered)

    return NamedState(
        slots={plain.get(key, key): slots for key, slots in state["state"].items()},
        to_fill={},  # not `slots`: FSDP created those tensors for this call, some for several parameters
        groups=[{**group, "params": [plain[name] for name in group["params"]]} for group in state["param_groups"]],
        aliases={name: name for name in own_name},
        fit=lambda name, stored: stored,  # FSDP compares the shapes
        array=_AbstractStates(model),
        restore=restore,
    )


class _AbstractStates:
    """Creates abstract tensors for the state of a parameter, with the sharding of the model's sharded state dict."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._parameters: Mapping[str, Any] | None = None

    def __call__(self, name: str, stored: AbstractArray) -> object:
        if self._parameters is None:
            with _sharded(self._model):
                state = self._model.state_dict()
            self._parameters = {plain: state[own] for own, plain in plain_names(self._model, state).items()}
        parameter = self._parameters.get(name)
        encoding = encoding_of_stored(stored.dtype.name, PLAIN_ARRAY)
        if (
            encoding is not None
            and isinstance(parameter, ShardedTensor)
            and tuple(parameter.metadata().size) == stored.shape
        ):
            return sharded_like(parameter, encoding.dtype)
        return (
            abstract_state_like(parameter, stored) if isinstance(parameter, torch.Tensor) else abstract_tensor(stored)
        )


@contextmanager
def _sharded(model: torch.nn.Module) -> Iterator[None]:
    """Select sharded state dicts inside the context, whatever state dict type the model has.

    Full state dicts are not suitable: several of their CPU tensors can share one buffer (torch
    2.13.0).
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP.state_dict_type", category=FutureWarning)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            yield
