"""The state of an engine of DeepSpeed, by the names of parameters.

`checkpointables` returns the objects that make up the state of a ``DeepSpeedEngine``, and `with_engines` the Context
that saves and loads them::

    context = with_engines()
    ckptcore.save_checkpointables("step-10", checkpointables(engine), context=context)
    ckptcore.load_checkpointables("step-10", into=checkpointables(engine), context=context)

All processes save into one checkpoint, each of them its own part, and nothing is gathered on one process. The
checkpoint has whole arrays, so it loads on another number of processes, and in another stage of ZeRO:

================  ====================================================================
``model``         the weights, as in the state dict of the module
``optimizer``     the state of each parameter, and the options of each group, in the
                  form of `ckptcore_torch.named_optimizers.NamedOptimizer`
``fp32_weights``  the weights that the optimizer steps, if the model has others
``engine``        counters, the loss scale, and the schedule of the learning rate
================  ====================================================================
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from ckptcore_torch.conversions import host_view
from ckptcore_torch.dtypes import encoding_of
from ckptcore_torch.modules import ModuleHandler
from ckptcore_torch.named_optimizers import NamedOptimizer
from deepspeed import comm
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

from ckptcore import Context, ShardedArray
from ckptcore.errors import TreeMismatchError, UnsupportedLeafError
from ckptcore.events import logger_named
from ckptcore.handlers import state_to_load
from ckptcore.model import AbstractArray
from ckptcore.protocols import CheckpointableHandler, Priority
from ckptcore_integrations.deepspeed_fragments import OPTIMIZERS, Fragment, fragment_of_weight, fragments_of

__all__ = ["Engines", "checkpointables", "with_engines"]

logger = logger_named("ckptcore.integrations.deepspeed")

_MODULES: Final = ModuleHandler()
_NOT_ELEMENTWISE: Final = ("step", "eta", "mu", "mu_product")
"""Numbers in the states of PyTorch's optimizers, which have the shape of a parameter without axes."""


def checkpointables(engine: Any, *, gather_weights: bool = False) -> dict[str, object]:
    """Return the objects that make up the state of an engine, to save, to check, or to load into.

    Args:
        engine: the engine that ``deepspeed.initialize`` returned, on every process of the job.
        gather_weights: True to save the weights of ZeRO 3 as whole arrays, in files that other software opens. The
            first process then gathers them in its host memory.

    Raises:
        NotImplementedError: the engine has a state that cannot be saved; names it, and what to do.
    """
    _refuse_unsupported(engine)
    found: dict[str, object] = {"model": _Weights(engine, gather_weights)}
    if type(engine.optimizer) in OPTIMIZERS:
        found["optimizer"] = _OptimizerState(engine)
        if not _steps_weights(engine):
            found["fp32_weights"] = _SteppedWeights(engine)
    elif isinstance(engine.optimizer, torch.optim.Optimizer):
        found["optimizer"] = NamedOptimizer(engine.module, engine.optimizer)
    return {**found, "engine": _EngineState(engine)}


def with_engines(context: Context | None = None) -> Context:
    """Return a Context that also has the handlers of the objects of `checkpointables`."""
    context = context or Context()
    handlers = {**context.plugins.handlers, **_HANDLERS}
    return dataclasses.replace(context, plugins=dataclasses.replace(context.plugins, handlers=handlers))


class Engines:
    """The kind of training with DeepSpeed: a `ckptcore_integrations.training_kinds.TrainingKind`."""

    is_whole = False

    def __init__(self, *, gather_weights: bool = False) -> None:
        self._gather = gather_weights
        self.context: Context | None = with_engines()

    def model(self, model: Any) -> object:
        """Return the weights of an engine."""
        gather = self._gather and model.zero_gather_16bit_weights_on_model_save()
        return checkpointables(model, gather_weights=gather and _has_sharded_weights(model))["model"]

    def optimizer(self, model: Any, optimizer: Any) -> object:
        """Return the state of the engine's optimizer."""
        return checkpointables(model).get("optimizer", {})

    def others(self, model: Any) -> dict[str, object]:
        """Return the other objects of an engine."""
        found = checkpointables(model)
        return {name: value for name, value in found.items() if name not in ("model", "optimizer")}

    def schedulers(self, schedulers: Sequence[Any]) -> list[Any]:
        """Return the schedulers that are not part of an engine."""
        from accelerate.utils import DeepSpeedSchedulerWrapper  # an engine by itself does not need Accelerate

        return [scheduler for scheduler in schedulers if not isinstance(scheduler, DeepSpeedSchedulerWrapper)]

    def state_dicts(self, *models: Any) -> AbstractContextManager[None]:
        """Return a context that changes nothing."""
        return nullcontext()

    def sizes_of_weights(self, model: Any) -> Mapping[str, int] | None:
        """Return the sizes of the weights, or None if they are saved in slices."""
        if not _has_sharded_weights(model):
            return {name: tensor.nbytes for name, tensor in model.module.state_dict().items()}
        if not self._gather or not model.zero_gather_16bit_weights_on_model_save():
            return None
        return {
            name: held.ds_numel * held.element_size() if hasattr(held, "ds_id") else held.nbytes
            for name, held in _named_weights(model)
        }


def _has_sharded_weights(engine: Any) -> bool:
    """Return True if a process has only slices of the weights, as with ZeRO 3."""
    return any(hasattr(parameter, "ds_id") for parameter in engine.module.parameters())


def _refuse_unsupported(engine: Any) -> None:
    zero = engine._config.zero_config
    optimizer = engine.optimizer
    kind = type(optimizer)
    basic = type(getattr(optimizer, "optimizer", optimizer))
    known = (
        optimizer is None or kind in (*OPTIMIZERS, DeepSpeedZeRoOffload) or isinstance(optimizer, torch.optim.Optimizer)
    )
    devices = [getattr(zero, name) for name in ("offload_optimizer", "offload_param")]
    unsupported = {
        "pipeline parallelism (PipelineEngine)": isinstance(engine, PipelineEngine),
        "mixtures of experts (deepspeed.moe)": engine.has_moe_layers,
        "tensor parallelism": engine.mp_world_size > 1 or engine.autotp_size() > 1,
        f"ZeRO with {kind.__name__}": not known,
        f"the optimizer {basic.__name__}": ".onebit." in basic.__module__ or ".muon." in basic.__module__,
        "offload to NVMe": any(device is not None and device.device == "nvme" for device in devices),
        "offload_optimizer.ratio": devices[0] is not None and devices[0].ratio != 1.0,
        "ZeRO++ (zero_hpz_partition_size, zero_quantized_weights, zero_quantized_nontrainable_weights)": (
            zero.zero_hpz_partition_size > 1 or zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights
        ),
        "ZeRO within groups of processes": engine.seq_dp_world_size != comm.get_world_size(),
        "curriculum learning and random layer token dropping": (
            engine.curriculum_learning_enabled() or engine.random_ltd_enabled()
        ),
    }
    for name, used in unsupported.items():
        if used:
            raise NotImplementedError(
                f"ckptcore does not save the state of {name} with DeepSpeed. Turn it off in the configuration of "
                "DeepSpeed, or save with engine.save_checkpoint(directory), which writes DeepSpeed's own files"
            )


def _steps_weights(engine: Any) -> bool:
    """Return True if the optimizer's copies of the weights have their dtype, and so are equal to them."""
    dtypes = {name: parameter.dtype for parameter, name in engine.param_names.items()}
    return all(fragment.tensor.dtype == dtypes[fragment.name] for fragment in fragments_of(engine))


def _named_weights(engine: Any) -> Iterator[tuple[str, Any]]:
    """Return the parameters and buffers of a divided module. A tied parameter has its first name.

    Raises:
        UnsupportedLeafError: the state dict has something else.
    """
    found = set()
    for name, held in engine.module.state_dict(keep_vars=True).items():
        if not isinstance(held, torch.Tensor):
            raise UnsupportedLeafError(
                f"{name}: with ZeRO 3, a state dict can only have tensors; found {type(held).__qualname__}. Register it "
                "for checkpointing by itself, or use ZeRO 2"
            )
        if not hasattr(held, "ds_id") or held.ds_id not in found:
            yield name, held
        found.add(getattr(held, "ds_id", None))


@dataclass(frozen=True, slots=True)
class _Weights:
    engine: Any
    gather: bool


class _WeightsHandler(CheckpointableHandler):
    """Weights as in the state dict of the module. With ZeRO 3, each process has slices of them."""

    priority = Priority.EXACT

    def flatten(self, value: _Weights) -> object:
        """Return the state dict of the module, with sharded arrays for divided parameters."""
        engine = value.engine
        if not _has_sharded_weights(engine):
            return _MODULES.flatten(engine.module)
        whole = engine._zero3_consolidated_16bit_state_dict() if value.gather else None
        return {name: self._array(name, held, value, whole) for name, held in _named_weights(engine)}

    def _array(self, name: str, held: Any, value: _Weights, whole: Mapping[str, torch.Tensor] | None) -> object:
        if value.gather:
            shape = tuple(held.ds_shape) if hasattr(held, "ds_id") else tuple(held.shape)
            dtype = encoding_of(held.dtype).name
            if whole is None:
                return ShardedArray(shape, dtype, [])  # the first process has it
            return ShardedArray.part(host_view(whole[name]), (0,) * len(shape), shape)
        if not hasattr(held, "ds_id"):
            return held.detach()
        fragment = fragment_of_weight(name, held)
        return fragment.array(fragment.tensor)

    def flatten_to_load(self, value: _Weights, stored: object) -> object:
        """Return the request for the slices of this process, or for the module."""
        engine = value.engine
        if not _has_sharded_weights(engine):
            return _MODULES.flatten_to_load(engine.module, stored)
        request: dict[str, object] = {}
        for name, held in _named_weights(engine):
            request[name] = (
                fragment_of_weight(name, held).request(held.dtype) if hasattr(held, "ds_id") else held.detach()
            )
        if isinstance(stored, Mapping):  # a plain module saves a tied parameter under all its names
            for name, held in engine.module.state_dict(keep_vars=True).items():
                if name not in request and name in stored:
                    request[name] = fragment_of_weight(name, held).request(held.dtype)
        return request

    def unflatten(self, like: _Weights, state: object) -> object:
        """Return the weights of this process."""
        return state

    def restore(self, target: _Weights, state: Any) -> None:
        """Load the weights, also into the optimizer's copies. ``fp32_weights`` are restored later, if there are any."""
        engine = target.engine
        if not _has_sharded_weights(engine):
            _MODULES.restore(engine.module, state)
        else:
            engine.optimizer.checkpoint_event_prologue()  # drops the whole parameters that a process may have
            for name, held in engine.module.state_dict(keep_vars=True).items():
                if name in state and hasattr(held, "ds_id"):
                    fragment = fragment_of_weight(name, held)
                    fragment.fill(fragment.tensor, state[name])
            engine.optimizer.checkpoint_event_epilogue()
        if type(engine.optimizer) in OPTIMIZERS:
            engine.optimizer.refresh_fp32_params()

    def may_refuse(self, target: _Weights, request: object) -> bool:
        """Return True if the module may."""
        engine = target.engine
        return not _has_sharded_weights(engine) and _MODULES.may_refuse(engine.module, request)


@dataclass(frozen=True, slots=True)
class _SteppedWeights:
    engine: Any


class _SteppedWeightsHandler(CheckpointableHandler):
    """The weights that the optimizer steps, of which the model has a copy in 16 bits."""

    priority = Priority.EXACT

    def flatten(self, value: _SteppedWeights) -> object:
        """Return the part of this process, by parameter."""
        return {fragment.name: fragment.array(fragment.tensor) for fragment in fragments_of(value.engine)}

    def flatten_to_load(self, value: _SteppedWeights, stored: object) -> object:
        """Return the request for the part of this process."""
        return {fragment.name: fragment.request(fragment.tensor.dtype) for fragment in fragments_of(value.engine)}

    def unflatten(self, like: _SteppedWeights, state: object) -> object:
        """Return the part of this process."""
        return state

    def restore(self, target: _SteppedWeights, state: Any) -> None:
        """Copy it into the tensors of the optimizer."""
        for fragment in fragments_of(target.engine):
            fragment.fill(fragment.tensor, state[fragment.name])

    def may_refuse(self, target: _SteppedWeights, request: object) -> bool:
        """Return False."""
        return False


@dataclass(frozen=True, slots=True)
class _OptimizerState:
    engine: Any

    @property
    def groups(self) -> list[dict[str, Any]]:
        return list(self.engine.optimizer.optimizer.param_groups)

    def slots(self, fragment: Fragment) -> dict[str, Any]:
        """Return the state of the tensor with a fragment."""
        state = self.engine.optimizer.optimizer.state
        return dict(state[fragment.tensor]) if fragment.tensor in state else {}


class _OptimizerStateHandler(CheckpointableHandler):
    """``{"state": {name: slots}, "param_groups": [{option: value, "params": names}]}``, as `NamedOptimizer`.

    Other states than arrays of the size of the parameters belong to a tensor with many of them. They are saved for
    each, and must be equal for all that are then in one tensor.
    """

    priority = Priority.EXACT

    def flatten(self, value: _OptimizerState) -> object:
        """Return the part of this process, by parameter."""
        fragments = fragments_of(value.engine)
        state = {fragment.name: _slots_to_save(fragment, value.slots(fragment)) for fragment in fragments}
        return {"state": {name: slots for name, slots in state.items() if slots}, "param_groups": _groups(value)}

    def flatten_to_load(self, value: _OptimizerState, stored: Any) -> object:
        """Return the request for the part of this process, in the stored form.

        Raises:
            TreeMismatchError: the checkpoint has other parameters, in other groups.
        """
        own = _groups(value)
        if not isinstance(stored, Mapping) or not isinstance(stored.get("param_groups"), list):
            return self.flatten(value)
        _expect_same_groups(own, stored["param_groups"])
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

    def unflatten(self, like: _OptimizerState, state: object) -> object:
        """Return the part of this process."""
        return state

    def restore(self, target: _OptimizerState, state: Any) -> None:
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


def _groups(value: _OptimizerState) -> list[dict[str, Any]]:
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


def _expect_same_groups(own: list[dict[str, Any]], stored: list[Any]) -> None:
    groups = [set(group["params"]) for group in own]
    found = [set(group.get("params", ())) if isinstance(group, Mapping) else set() for group in stored]
    if groups == found:
        return
    known, names = set().union(*groups), set().union(*found)
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


@dataclass(frozen=True, slots=True)
class _EngineState:
    engine: Any


_COUNTERS: Final = ("global_steps", "global_samples", "skipped_steps")
_OF_SCALE: Final = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class _EngineStateHandler(CheckpointableHandler):
    """Counters of an engine, its loss scale, and its schedule of the learning rate."""

    priority = Priority.EXACT

    def flatten(self, value: _EngineState) -> object:
        """Return the state. Log a warning if gradients are lost."""
        engine = value.engine
        boundary = engine._is_gradient_accumulation_boundary
        if engine.micro_steps % engine.gradient_accumulation_steps() if boundary is None else not boundary:
            logger.warning(
                "the engine of DeepSpeed has gradients of some micro batches, which a checkpoint does not have: a "
                "resumed run steps without them. Save after engine.step() has stepped the optimizer"
            )
        return _state_of(engine)

    def flatten_to_load(self, value: _EngineState, stored: object) -> object:
        """Return the request, with the stored forms of the schedule and the loss scale, which not every stage has."""
        own = _state_of(value.engine)
        if not isinstance(stored, Mapping):
            return own
        own.pop("loss_scale", None)
        known = {*own, "loss_scale"} & stored.keys()
        return {**own, **{name: state_to_load(own.get(name), stored[name]) for name in known}}

    def unflatten(self, like: _EngineState, state: object) -> object:
        """Return the state."""
        return state

    def undo(self, target: _EngineState) -> Callable[[], None]:
        """Return a function that puts the present state back."""
        state = copy.deepcopy(_state_of(target.engine))
        return lambda: self.restore(target, state)

    def restore(self, target: _EngineState, state: Any) -> None:
        """Set the counters, and load the others. The loss scale of a static scaler is an option, which stays."""
        engine = target.engine
        for name in _COUNTERS:
            setattr(engine, name, state[name])
        steps = engine.gradient_accumulation_steps()
        engine.micro_steps = state["micro_steps"] // state["gradient_accumulation_steps"] * steps
        scale = _loss_scale(engine)
        loaded = state.get("loss_scale", {})
        if _is_dynamic(scale) and loaded.get("last_overflow_iter") is not None:
            for name, value in loaded.items():
                if hasattr(scale, name):
                    setattr(scale, name, value)
        if "autocast_scaler" in state:
            engine.optimizer.torch_autocast_gradscaler.load_state_dict(state["autocast_scaler"])
        if "lr_scheduler" in state:
            engine.lr_scheduler.load_state_dict(state["lr_scheduler"])


def _state_of(engine: Any) -> dict[str, Any]:
    steps = engine.gradient_accumulation_steps()
    state: dict[str, Any] = {name: getattr(engine, name) for name in _COUNTERS}
    state["micro_steps"] = engine.micro_steps // steps * steps
    state["gradient_accumulation_steps"] = steps
    if (scale := _loss_scale(engine)) is not None:
        state["loss_scale"] = {name: getattr(scale, name) for name in _OF_SCALE if hasattr(scale, name)}
    if (scaler := getattr(engine.optimizer, "torch_autocast_gradscaler", None)) is not None:
        state["autocast_scaler"] = scaler.state_dict()
    if engine.lr_scheduler is not None:
        state["lr_scheduler"] = engine.lr_scheduler.state_dict()
    return state


def _loss_scale(engine: Any) -> Any:
    """Return the object with the loss scale, or None if there is none."""
    optimizer = engine.optimizer
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


def _is_dynamic(scale: Any) -> bool:
    return bool(getattr(scale, "dynamic", getattr(scale, "dynamic_loss_scale", False)))


_HANDLERS: Final[Mapping[type, CheckpointableHandler]] = {
    _Weights: _WeightsHandler(),
    _SteppedWeights: _SteppedWeightsHandler(),
    _OptimizerState: _OptimizerStateHandler(),
    _EngineState: _EngineStateHandler(),
}
