"""Optimizer state of a DeepSpeed engine, by the names of parameters.

ZeRO packs the parameters of a group one after another into a flat tensor, and each process steps a slice of it. So a
process has one range of the elements of a parameter, in C order: its fragment. A fragment consists of a few boxes of
the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from ckptcore_torch.conversions import elements_as, encoding_of, host_view
from deepspeed import comm
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ckptcore import ArrayShard, ShardedArray
from ckptcore.errors import TreeMismatchError
from ckptcore.handlers import state_to_load
from ckptcore.model import AbstractArray, ArrayRecord, ArraySpec, Box, name_of_dtype
from ckptcore.planning import boxes_of_range
from ckptcore.protocols import CheckpointableHandler, Priority

OPTIMIZERS = (
    DeepSpeedZeroOptimizer,
    DeepSpeedZeroOptimizer_Stage3,
    BF16_Optimizer,
    FP16_Optimizer,
    FP16_UnfusedOptimizer,
)
"""The supported optimizers of DeepSpeed. Subclasses are not supported, because they divide parameters differently."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """A range of the elements of a parameter, in C order, and its place in a tensor of this process.

    Attributes:
        name: the name of the parameter in the module.
        shape: the shape of the whole parameter.
        start: the first element of the parameter that this process has.
        count: the number of elements, which may be 0.
        tensor: the tensor with these elements. For fragments of an optimizer, the tensor that the optimizer steps.
        offset: position of the elements in the flattened tensor, in elements.
        group: the number of the optimizer's parameter group.
        replicas: the number of processes that have these elements. The rank of a process is its replica number.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    count: int
    tensor: torch.Tensor
    offset: int = 0
    group: int = 0
    replicas: int = 1

    @property
    def _is_whole(self) -> bool:
        """True if the tensor has the shape of the parameter. Its strides may differ from those of a flat tensor."""
        return tuple(self.tensor.shape) == self.shape and self.count == math.prod(self.shape)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fragment's elements of a tensor with the same shape as the fragment's tensor."""
        tensor = tensor.detach()
        return tensor if self._is_whole else tensor[self.offset : self.offset + self.count]

    def pieces(self, own: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
        """Return the boxes of the parameter, each with a view of its elements."""
        if self._is_whole:
            yield Box.whole(self.shape), own
            return
        position = 0
        for box in boxes_of_range(self.shape, self.start, self.start + self.count):
            yield box, own[position : position + box.size].view(box.shape)
            position += box.size

    def array(self, tensor: torch.Tensor) -> ShardedArray:
        """Return the fragment's elements of a tensor (see `_own`) as a part of the parameter.

        Does not copy CPU memory.
        """
        replica = comm.get_rank() if self.replicas > 1 else 0
        shards = [
            ArrayShard(box, host_view(view), replica, self.replicas)
            for box, view in self.pieces(self._own(tensor).cpu())
        ]
        return ShardedArray(self.shape, encoding_of(tensor.dtype).name, shards)

    def request(self, dtype: torch.dtype | np.dtype[Any]) -> ShardedArray:
        """Return the request for the elements of the fragment."""
        named = encoding_of(dtype).name if isinstance(dtype, torch.dtype) else dtype
        return ShardedArray(self.shape, named, [ArrayShard(box) for box, _ in self.pieces(self._own(self.tensor))])

    def fill(self, tensor: torch.Tensor, loaded: ShardedArray) -> None:
        """Copy the loaded elements into the fragment's range of a tensor (see `_own`)."""
        elements = {shard.box: shard.elements for shard in loaded.shards}
        for box, view in self.pieces(self._own(tensor)):
            part = np.ascontiguousarray(elements[box])
            record = ArrayRecord(ArraySpec(part.shape, name_of_dtype(part.dtype)))
            view.copy_(elements_as(part, record, tensor.dtype).view(view.shape))


def fragment_of_weight(name: str, parameter: Any) -> Fragment:
    """Return the fragment of a parameter that ZeRO 3 has divided, with the weights of this process."""
    rank = comm.get_rank(group=parameter.ds_process_group)
    size = parameter.ds_tensor.ds_numel  # with padding
    start = min(rank * size, parameter.ds_numel)
    return Fragment(name, tuple(parameter.ds_shape), start, min(size, parameter.ds_numel - start), parameter.ds_tensor)


def fragments_of(engine: Any) -> list[Fragment]:
    """Return the fragments of an engine with one of `OPTIMIZERS`: one per parameter, on every process."""
    optimizer, names = engine.optimizer, engine.param_names
    kind = type(optimizer)
    if kind is DeepSpeedZeroOptimizer:
        return list(_flat_fragments(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, names))
    if kind is BF16_Optimizer:
        return list(_flat_fragments(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, names))
    if kind is DeepSpeedZeroOptimizer_Stage3:
        return list(_stage3_fragments(optimizer, names))
    masters = optimizer.fp32_groups_flat if kind is FP16_Optimizer else optimizer.fp32_groups
    return list(_replicated_fragments(optimizer.fp16_groups, masters, names))


def _flat_fragments(
    groups: Sequence[Sequence[Any]], flats: Sequence[torch.Tensor], names: Mapping[Any, str]
) -> Iterator[Fragment]:
    """Yield fragments of ZeRO 1 and 2, in which a process has a slice of the packed parameters of a group."""
    for number, (group, flat) in enumerate(zip(groups, flats, strict=True)):
        for parameter in group:
            name, shape, mapping = names[parameter], tuple(parameter.shape), parameter._hp_mapping
            if mapping is None:
                yield Fragment(name, shape, 0, 0, flat, 0, number)
            else:
                whole, own = mapping.lp_fragment_address, mapping.hp_fragment_address
                yield Fragment(name, shape, whole.start, whole.numel, flat, own.start, number)


def _stage3_fragments(optimizer: Any, names: Mapping[Any, str]) -> Iterator[Fragment]:
    """Yield fragments of ZeRO 3. A process has a slice of each parameter, and packs slices into flat tensors."""
    for number, parameters in enumerate(optimizer.fp16_groups):
        flat, group = optimizer.fp32_partitioned_groups_flat[number], optimizer.sub_group_to_group_id[number]
        offset = 0
        for parameter in parameters:
            weight = fragment_of_weight(names[parameter], parameter)
            yield Fragment(weight.name, weight.shape, weight.start, weight.count, flat, offset, group)
            offset += parameter.partition_numel()


def _replicated_fragments(
    groups: Sequence[Sequence[Any]], masters: Sequence[Any], names: Mapping[Any, str]
) -> Iterator[Fragment]:
    """Yield fragments of 16-bit models without ZeRO.

    Each process has all elements, in one flat tensor or in several.
    """
    processes = comm.get_world_size()
    for number, (group, tensors) in enumerate(zip(groups, masters, strict=True)):
        is_flat = isinstance(tensors, torch.Tensor)
        offset = 0
        for position, parameter in enumerate(group):
            tensor = tensors if is_flat else tensors[position]
            shape, count = tuple(parameter.shape), parameter.numel()
            yield Fragment(names[parameter], shape, 0, count, tensor, offset, number, processes)
            offset += count if is_flat else 0


_NOT_ELEMENTWISE: Final = ("step", "eta", "mu", "mu_product")
"""Scalar states of PyTorch's optimizers. Elementwise states of a parameter without axes have the same shape."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The state of an engine's optimizer, one of `OPTIMIZERS`."""

    engine: Any

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Return the groups of its parameters."""
        return list(self.engine.optimizer.optimizer.param_groups)

    def slots(self, fragment: Fragment) -> dict[str, Any]:
        """Return the optimizer's state of the tensor that contains a fragment."""
        state = self.engine.optimizer.optimizer.state
        return dict(state[fragment.tensor]) if fragment.tensor in state else {}


class OptimizerStateHandler(CheckpointableHandler):
    """Handler of optimizer states, in the form of `NamedOptimizer`.

    The form is ``{"state": {name: slots}, "param_groups": [{option: value, "params": names}]}``.

    Scalar states, such as the number of steps, belong to a flat tensor with many parameters. They are saved for each
    parameter. On load they must be equal for all parameters that are in one flat tensor.
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
            TreeMismatchError: the checkpoint has other parameters or other groups.
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
                slot: fragment.request(held[slot].dtype if slot in held else stored_slot.dtype)
                if slot in elementwise
                else state_to_load(held.get(slot), stored_slot, array=_cpu_tensor)
                for slot, stored_slot in slots.items()
            }
        return {"state": state, "param_groups": options} if "state" in stored else {"param_groups": options}

    def unflatten(self, like: OptimizerState, state: object) -> object:
        """Return the part of this process."""
        return state

    def restore(self, target: OptimizerState, state: Any) -> None:
        """Copy the states of parameters into the states of the flat tensors, and set the options.

        Raises:
            TreeMismatchError: parameters that are now in one tensor have different scalar states, such as numbers of
                steps.
        """
        states: Mapping[str, Any] = state.get("state") or {}
        members: dict[torch.Tensor, list[Fragment]] = {}
        for fragment in fragments_of(target.engine):
            members.setdefault(fragment.tensor, []).append(fragment)
        numbers = {tensor: _common_numbers(fragments, states) for tensor, fragments in members.items()}
        basic = target.engine.optimizer.optimizer
        for group, loaded in zip(basic.param_groups, state["param_groups"], strict=True):
            group.update({name: option for name, option in loaded.items() if name != "params"})
        for tensor, fragments in members.items():
            arrays = {
                slot: array
                for fragment in fragments
                for slot, array in states.get(fragment.name, {}).items()
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
                    if slot in states.get(fragment.name, {}):
                        fragment.fill(slots[slot], states[fragment.name][slot])
            on_device = any(basic.param_groups[fragments[0].group].get(name) for name in ("capturable", "fused"))
            for slot, number in numbers[tensor].items():
                is_moved = on_device and isinstance(number, torch.Tensor)
                slots[slot] = number.to(tensor.device) if is_moved else number
        if hasattr(target.engine.optimizer, "_hp_optimizer_states_linked") and states:
            target.engine.optimizer._hp_optimizer_states_linked = False
            target.engine.optimizer._lazy_init_hp_params_optimizer_state()  # links parameters to the state


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
    shapes = {
        (slot, fragments[name].shape)
        for name, slots in stored.items()
        for slot, value in slots.items()
        if isinstance(value, AbstractArray) and value.shape == fragments[name].shape
    }
    return {slot for slot, shape in shapes if shape or slot not in _NOT_ELEMENTWISE}


def _expect_same_groups(own: list[dict[str, Any]], stored: list[Any], slots: Mapping[Any, Any]) -> None:
    groups = [set(group["params"]) for group in own]
    stored_groups = [set(group.get("params", ())) if isinstance(group, Mapping) else set() for group in stored]
    if groups == stored_groups and slots.keys() <= set().union(*groups):
        return
    known, names = set().union(*groups), set().union(*stored_groups, slots)
    differences = [
        *(f"{name} is in no stored group" for name in sorted(known - names, key=str)),
        *(f"{name} is stored but is not a parameter of the optimizer" for name in sorted(names - known, key=str)),
    ] or [
        (
            f"{len(stored_groups)} groups with the same parameters are stored, and the optimizer divides them "
            f"in {len(groups)}"
        )
    ]
    raise TreeMismatchError(
        f"the stored state does not fit the optimizer: {'; '.join(differences[:20])}. Create the model and the groups "
        "of the optimizer as for the save, with the same frozen parameters",
        differences,
    )


def _common_numbers(fragments: list[Fragment], states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scalar states of a flat tensor, which must be equal for all of its parameters."""
    common: dict[str, Any] = {}
    for fragment in fragments:
        for slot, value in states.get(fragment.name, {}).items():
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
    dtype: torch.dtype = getattr(torch, name)
    return dtype
