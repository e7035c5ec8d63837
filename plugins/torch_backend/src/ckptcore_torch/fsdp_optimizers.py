"""The state by names of an optimizer of a model under FSDP1, `torch.distributed.fsdp.FullyShardedDataParallel`.

There the optimizer has flat parameters, or pieces of them, which only FSDP can take apart. What its state is made of then,
ShardedTensors, DTensors or whole tensors, is said by the state dict type that is set for the model, as for its own state dict.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.fsdp import FullOptimStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model import PLAIN_ARRAY, AbstractArray
from ckptcore_torch.abstracts import abstract_beside, abstract_tensor
from ckptcore_torch.dtypes import encoding_of_stored
from ckptcore_torch.names import plain_names
from ckptcore_torch.optimizer_names import NamedState
from ckptcore_torch.optimizers import OptimizerHandler
from ckptcore_torch.sharded_tensors import sharded_like

__all__ = ["fsdp_named_state"]


def fsdp_named_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> NamedState:
    """See `ckptcore_torch.optimizer_names.named_state`. The processes of the model exchange what they hold: all must call it.

    Raises:
        UnsupportedLeafError: if the state dict type is LOCAL_STATE_DICT, which has no names.
    """
    with _on_every_rank(model) as kind:
        state = FSDP.optim_state_dict(model, optimizer)
    own_names = [name for group in state["param_groups"] for name in group["params"]]
    plain = plain_names(model, own_names)
    own_name = {name: own for own, name in plain.items()}

    def restore(slots: Mapping[Any, Any], groups: list[dict[str, Any]]) -> None:
        named = {
            "state": {own_name.get(key, key): value for key, value in slots.items()},
            "param_groups": [{**group, "params": [own_name[name] for name in group["params"]]} for group in groups],
        }
        with _on_every_rank(model):
            numbered = FSDP.optim_state_dict_to_load(model, optimizer, named)
        OptimizerHandler().restore(optimizer, numbered)

    return NamedState(
        slots={plain.get(key, key): slots for key, slots in state["state"].items()},
        groups=[{**group, "params": [plain[name] for name in group["params"]]} for group in state["param_groups"]],
        aliases={name: name for name in own_name},
        array=_Beside(model, kind),
        restore=restore,
    )


class _Beside:
    """Makes abstract tensors for the state of a parameter, sharded as the parameter is in the state dict of the model."""

    def __init__(self, model: torch.nn.Module, kind: StateDictType) -> None:
        self._model = model
        self._kind = kind
        self._parameters: Mapping[str, Any] | None = None

    def __call__(self, name: str, stored: AbstractArray) -> object:
        if self._kind is StateDictType.FULL_STATE_DICT or not stored.shape:
            return abstract_tensor(stored)
        if self._parameters is None:
            state = self._model.state_dict()
            self._parameters = {plain: state[own] for own, plain in plain_names(self._model, state).items()}
        parameter = self._parameters.get(name)
        encoding = encoding_of_stored(stored.dtype.name, PLAIN_ARRAY)
        if encoding is not None and isinstance(parameter, ShardedTensor) and tuple(parameter.shape) == stored.shape:
            return sharded_like(parameter, encoding.dtype)
        return abstract_beside(parameter, stored) if isinstance(parameter, torch.Tensor) else abstract_tensor(stored)


@contextmanager
def _on_every_rank(model: torch.nn.Module) -> Iterator[StateDictType]:
    """Within it every process of the model gets a state, of the type that is set, which it gives."""
    settings = FSDP.get_state_dict_type(model)
    kind, options = settings.state_dict_type, settings.optim_state_dict_config
    if kind is StateDictType.LOCAL_STATE_DICT:
        raise UnsupportedLeafError(
            "the state dict type of the model is LOCAL_STATE_DICT, which has flat parameters and no names; "
            "set SHARDED_STATE_DICT with FullyShardedDataParallel.set_state_dict_type"
        )
    if isinstance(options, FullOptimStateDictConfig):
        # Left to itself, FSDP gives the state to rank 0 and nothing to the others.
        options = FullOptimStateDictConfig(offload_to_cpu=options.offload_to_cpu, rank0_only=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP.state_dict_type", category=FutureWarning)
        with FSDP.state_dict_type(model, kind, settings.state_dict_config, options):
            yield kind
