"""Weights of a DeepSpeed engine: the weights of the module, and the optimizer's copies of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from ckptcore_torch.conversions import encoding_of, host_view
from ckptcore_torch.modules import ModuleHandler

from ckptcore import ShardedArray
from ckptcore.errors import UnsupportedLeafError
from ckptcore.protocols import CheckpointableHandler, Priority
from ckptcore_integrations.deepspeed_optimizers import OPTIMIZERS, fragment_of_weight, fragments_of

_MODULES: Final = ModuleHandler()


def has_sharded_weights(engine: Any) -> bool:
    """Return True if a process has only slices of the weights, as with ZeRO 3."""
    return any(hasattr(parameter, "ds_id") for parameter in engine.module.parameters())


def steps_weights(engine: Any) -> bool:
    """Return True if the optimizer's weights have the dtype of the module's weights, and so equal them."""
    dtypes = {name: parameter.dtype for parameter, name in engine.param_names.items()}
    return all(fragment.tensor.dtype == dtypes[fragment.name] for fragment in fragments_of(engine))


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of an engine.

    Attributes:
        engine: the engine.
        gather: True to save whole arrays, even if the engine has slices.
        names: the names of the weights to save; None for all.
    """

    engine: Any
    gather: bool
    names: frozenset[str] | None = None

    def tensors(self) -> dict[str, Any]:
        """Return the tensors to save, by name. Parameters of ZeRO 3 have no elements."""
        state = self.engine.module.state_dict(keep_vars=True)
        return {name: state[name] for name in state if self.names is None or name in self.names}


def named_weights(weights: Weights) -> Iterator[tuple[str, Any]]:
    """Return the parameters and buffers of a divided module. A tied parameter is included once, with its first name.

    Raises:
        UnsupportedLeafError: the state dict has an entry that is not a tensor.
    """
    ids = set()
    for name, held in weights.tensors().items():
        if not isinstance(held, torch.Tensor):
            raise UnsupportedLeafError(
                f"{name}: with ZeRO 3, a state dict can only have tensors; found {type(held).__qualname__}. "
                "Save it as another object, or use ZeRO 2"
            )
        if not hasattr(held, "ds_id") or held.ds_id not in ids:
            yield name, held
        ids.add(getattr(held, "ds_id", None))


def _detached(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tensor.detach() if isinstance(tensor, torch.Tensor) else tensor for name, tensor in tensors.items()}


class WeightsHandler(CheckpointableHandler):
    """Weights as in the state dict of the module. With ZeRO 3, each process has slices of them."""

    priority = Priority.EXACT

    def flatten(self, value: Weights) -> object:
        """Return the state dict of the module, with sharded arrays for divided parameters."""
        engine = value.engine
        if not has_sharded_weights(engine):
            return _MODULES.flatten(engine.module) if value.names is None else _detached(value.tensors())
        whole = engine._zero3_consolidated_16bit_state_dict() if value.gather else None
        return {name: self._array(name, held, value, whole) for name, held in named_weights(value)}

    def _array(self, name: str, held: Any, value: Weights, whole: Mapping[str, torch.Tensor] | None) -> object:
        if value.gather:
            shape = tuple(held.ds_shape) if hasattr(held, "ds_id") else tuple(held.shape)
            dtype = encoding_of(held.dtype).name
            if whole is None:
                return ShardedArray(shape, dtype, [])  # only the first process saves it
            return ShardedArray.part(host_view(whole[name]), (0,) * len(shape), shape)
        if not hasattr(held, "ds_id"):
            return held.detach()
        fragment = fragment_of_weight(name, held)
        return fragment.array(fragment.tensor)

    def flatten_to_load(self, value: Weights, stored: object) -> object:
        """Return the request for the slices of this process, or for the module."""
        engine = value.engine
        if not has_sharded_weights(engine):
            is_whole = value.names is None
            return _MODULES.flatten_to_load(engine.module, stored) if is_whole else _detached(value.tensors())
        names = {name for name, _ in named_weights(value)}
        if isinstance(stored, Mapping):  # a module that is not divided saves a tied parameter under all names
            names |= stored.keys()
        return {
            name: fragment_of_weight(name, held).request(held.dtype) if hasattr(held, "ds_id") else held.detach()
            for name, held in value.tensors().items()
            if name in names
        }

    def unflatten(self, like: Weights, state: object) -> object:
        """Return the weights of this process."""
        return state

    def restore(self, target: Weights, state: Any) -> None:
        """Load the weights, also into the optimizer's copies. ``fp32_weights`` are restored later, if there are any."""
        engine = target.engine
        if not has_sharded_weights(engine):
            if target.names is None:  # with names, the tensors were filled in place
                _MODULES.restore(engine.module, state)
        else:
            if engine._optimizer_has_ckpt_event_prologue():
                engine.optimizer.checkpoint_event_prologue()  # frees gathered parameters
            for name, held in target.tensors().items():
                if name in state and hasattr(held, "ds_id"):
                    fragment = fragment_of_weight(name, held)
                    fragment.fill(fragment.tensor, state[name])
            if engine._optimizer_has_ckpt_event_epilogue():
                engine.optimizer.checkpoint_event_epilogue()
        if type(engine.optimizer) in OPTIMIZERS:
            engine.optimizer.refresh_fp32_params()

    def may_refuse(self, target: Weights, request: object) -> bool:
        """Return True if the module may refuse the request."""
        engine = target.engine
        return not has_sharded_weights(engine) and target.names is None and _MODULES.may_refuse(engine.module, request)


@dataclass(frozen=True, slots=True)
class SteppedWeights:
    """The weights that an engine's optimizer steps."""

    engine: Any


class SteppedWeightsHandler(CheckpointableHandler):
    """Handler of the weights that the optimizer steps. The model has 16-bit copies of them."""

    priority = Priority.EXACT

    def flatten(self, value: SteppedWeights) -> object:
        """Return the part of this process, by parameter."""
        return {fragment.name: fragment.array(fragment.tensor) for fragment in fragments_of(value.engine)}

    def flatten_to_load(self, value: SteppedWeights, stored: object) -> object:
        """Return the request for the part of this process."""
        return {fragment.name: fragment.request(fragment.tensor.dtype) for fragment in fragments_of(value.engine)}

    def unflatten(self, like: SteppedWeights, state: object) -> object:
        """Return the part of this process."""
        return state

    def restore(self, target: SteppedWeights, state: Any) -> None:
        """Copy the state into the tensors of the optimizer."""
        for fragment in fragments_of(target.engine):
            fragment.fill(fragment.tensor, state[fragment.name])

    def may_refuse(self, target: SteppedWeights, request: object) -> bool:
        """Return False."""
        return False
