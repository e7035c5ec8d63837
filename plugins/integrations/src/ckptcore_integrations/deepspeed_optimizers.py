"""State of the optimizer of an engine of DeepSpeed, by the names of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from ckptcore import ShardedArray
from ckptcore.errors import TreeMismatchError
from ckptcore.handlers import state_to_load
from ckptcore.model import AbstractArray
from ckptcore.protocols import CheckpointableHandler, Priority
from ckptcore_integrations.deepspeed_fragments import Fragment, fragments_of

_NOT_ELEMENTWISE: Final = ("step", "eta", "mu", "mu_product")
"""Numbers in the states of PyTorch's optimizers, which have the shape of a parameter without axes."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The state of an engine's optimizer, one of `deepspeed_fragments.OPTIMIZERS`."""

    engine: Any

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Return the groups of its parameters."""
        return list(self.engine.optimizer.optimizer.param_groups)

    def slots(self, fragment: Fragment) -> dict[str, Any]:
        """Return the state of the tensor with a fragment."""
        state = self.engine.optimizer.optimizer.state
        return dict(state[fragment.tensor]) if fragment.tensor in state else {}


class OptimizerStateHandler(CheckpointableHandler):
    """``{"state": {name: slots}, "param_groups": [{option: value, "params": names}]}``, as `NamedOptimizer`.

    Other states than arrays of the size of the parameters belong to a tensor with many of them. They are saved for
    each, and must be equal for all that are then in one tensor.
    """

    priority = Priority.EXACT

    def flatten(self, value: OptimizerState) -> object:
        """Return the part of this process, by parameter."""
        fragments = fragments_of(value.engine)
        state = {fragment.name: _slots_to_save(fragment, value.slots(fragment)) for fragment in fragments}
        return {"state": {name: slots for name, slots in state.items() if slots}, "param_groups": _groups(value)}

    def flatten_to_load(self, value: OptimizerState, stored: Any) -> object:
        """Return the request for the part of this process, in the stored form.

        Raises:
            TreeMismatchError: the checkpoint has other parameters, in other groups.
        """
        own = _groups(value)
        if not isinstance(stored, Mapping) or not isinstance(stored.get("param_groups"), list):
            return self.flatten(value)
        _expect_same_groups(own, stored["param_groups"], stored.get("state") or {})
        options = [
            {**state_to_load(group, its), "params": its["params"]}
            for group, its in zip(own, stored["param_groups"], strict=True)
        ]
        fragments = {fragment.name: fragment for fragment in fragments_of(value.engine)}
        stored_slots: Mapping[str, Any] = stored.get("state") or {}
        elementwise = _elementwise(fragments, stored_slots)
        state = {}
        for name, slots in stored_slots.items():
            fragment = fragments[name]
            held = value.slots(fragment)
            state[name] = {
                slot: fragment.request(held[slot].dtype if slot in held else found.dtype)
                if slot in elementwise
                else state_to_load(held.get(slot), found, array=_cpu_tensor)
                for slot, found in slots.items()
            }
        return {"state": state, "param_groups": options} if "state" in stored else {"param_groups": options}

    def unflatten(self, like: OptimizerState, state: object) -> object:
        """Return the part of this process."""
        return state

    def restore(self, target: OptimizerState, state: Any) -> None:
        """Copy the states of parameters into those of the flat tensors, and set the options.

        Raises:
            TreeMismatchError: parameters that are now in one tensor have different numbers of steps.
        """
        found: Mapping[str, Any] = state.get("state") or {}
        members: dict[torch.Tensor, list[Fragment]] = {}
        for fragment in fragments_of(target.engine):
            members.setdefault(fragment.tensor, []).append(fragment)
        numbers = {tensor: _common_numbers(fragments, found) for tensor, fragments in members.items()}
        basic = target.engine.optimizer.optimizer
        for group, loaded in zip(basic.param_groups, state["param_groups"], strict=True):
            group.update({name: option for name, option in loaded.items() if name != "params"})
        for tensor, fragments in members.items():
            arrays = {
                slot: array
                for fragment in fragments
                for slot, array in found.get(fragment.name, {}).items()
                if isinstance(array, ShardedArray)
            }
            if not arrays and not numbers[tensor]:
                basic.state.pop(tensor, None)
                continue
            slots = basic.state[tensor]
            for slot, array in arrays.items():
                if slot not in slots:
                    slots[slot] = torch.empty_like(tensor, dtype=_dtype_of(array), requires_grad=False)
                slots[slot].zero_()
                for fragment in fragments:
                    if slot in found.get(fragment.name, {}):
                        fragment.fill(slots[slot], found[fragment.name][slot])
            on_device = any(basic.param_groups[fragments[0].group].get(name) for name in ("capturable", "fused"))
            for slot, number in numbers[tensor].items():
                is_moved = on_device and isinstance(number, torch.Tensor)
                slots[slot] = number.to(tensor.device) if is_moved else number
        if hasattr(target.engine.optimizer, "_hp_optimizer_states_linked") and found:
            target.engine.optimizer._hp_optimizer_states_linked = False
            target.engine.optimizer._lazy_init_hp_params_optimizer_state()  # parameters refer to parts of the state


def _groups(value: OptimizerState) -> list[dict[str, Any]]:
    """Return the options of each group, with the names of its parameters."""
    names: dict[int, list[str]] = {}
    for fragment in fragments_of(value.engine):
        names.setdefault(fragment.group, []).append(fragment.name)
    return [{**group, "params": names.get(number, [])} for number, group in enumerate(value.groups)]


def _slots_to_save(fragment: Fragment, slots: Mapping[str, Any]) -> dict[str, Any]:
    return {
        slot: fragment.array(value)
        if isinstance(value, torch.Tensor) and value.shape == fragment.tensor.shape
        else value
        for slot, value in slots.items()
    }


def _elementwise(fragments: Mapping[str, Fragment], stored: Mapping[str, Any]) -> set[str]:
    """Return the slots that have a value for each element of a parameter."""
    found = {
        (slot, fragments[name].shape)
        for name, slots in stored.items()
        for slot, value in slots.items()
        if isinstance(value, AbstractArray) and value.shape == fragments[name].shape
    }
    return {slot for slot, shape in found if shape or slot not in _NOT_ELEMENTWISE}


def _expect_same_groups(own: list[dict[str, Any]], stored: list[Any], slots: Mapping[Any, Any]) -> None:
    groups = [set(group["params"]) for group in own]
    found = [set(group.get("params", ())) if isinstance(group, Mapping) else set() for group in stored]
    if groups == found and slots.keys() <= set().union(*groups):
        return
    known, names = set().union(*groups), set().union(*found, slots)
    differences = [
        *(f"{name} is in no stored group" for name in sorted(known - names, key=str)),
        *(f"{name} is stored but is not a parameter of the optimizer" for name in sorted(names - known, key=str)),
    ] or [f"{len(found)} groups with the same parameters are stored, and the optimizer divides them in {len(groups)}"]
    raise TreeMismatchError(
        f"the stored state does not fit the optimizer: {'; '.join(differences[:20])}. Create the model and the groups "
        "of the optimizer as for the save, with the same frozen parameters",
        differences,
    )


def _common_numbers(fragments: list[Fragment], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of a tensor that are not arrays of its size, from those of its parameters."""
    common: dict[str, Any] = {}
    for fragment in fragments:
        for slot, value in found.get(fragment.name, {}).items():
            if isinstance(value, ShardedArray):
                continue
            if slot in common and bool(common[slot] != value):
                difference = f"{slot} of {fragments[0].name} is {common[slot]}, of {fragment.name} it is {value}"
                raise TreeMismatchError(
                    f"{difference}. ZeRO steps them together, so they must be equal: load into an engine without ZeRO, "
                    "or load only the weights",
                    [difference],
                )
            common[slot] = value
    return common


def _cpu_tensor(stored: AbstractArray) -> torch.Tensor:
    return torch.empty(stored.shape, dtype=_torch_dtype(stored.dtype.name), device="meta")


def _dtype_of(array: ShardedArray) -> torch.dtype:
    return _torch_dtype(array.dtype.name)


def _torch_dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
