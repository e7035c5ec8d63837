"""State of a DeepSpeed engine, by the names of parameters.

`checkpointables` returns the objects that make up the state of a ``DeepSpeedEngine``. `with_engines` returns the
Context that saves and loads them::

    context = with_engines()
    ckptcore.save_checkpointables("step-10", checkpointables(engine), context=context)
    ckptcore.load_checkpointables("step-10", into=checkpointables(engine), context=context)

Each process saves its own part into one checkpoint, and nothing is gathered on one process. The checkpoint has whole
arrays, so it loads on another number of processes, and in another stage of ZeRO:

================  ====================================================================
``model``         the weights, as in the state dict of the module
``optimizer``     the state of each parameter, and the options of each group, in the
                  form of `ckptcore_torch.named_optimizers.NamedOptimizer`
``fp32_weights``  the optimizer's own copy of the weights, if it has one
``engine``        counters, the loss scale, and the schedule of the learning rate
================  ====================================================================
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from ckptcore_torch.named_optimizers import NamedOptimizer
from deepspeed import comm
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

from ckptcore import Context
from ckptcore.errors import CheckpointError
from ckptcore.events import logger_named
from ckptcore.handlers import state_to_load
from ckptcore.protocols import CheckpointableHandler, Priority
from ckptcore_integrations.adapters import adapter_tensors, has_adapters
from ckptcore_integrations.deepspeed_optimizers import OPTIMIZERS, OptimizerState, OptimizerStateHandler
from ckptcore_integrations.deepspeed_weights import (
    SteppedWeights,
    SteppedWeightsHandler,
    Weights,
    WeightsHandler,
    has_sharded_weights,
    named_weights,
    steps_weights,
)

__all__ = ["Engines", "checkpointables", "with_engines"]

logger = logger_named("ckptcore.integrations.deepspeed")

_STAGE_OF_WEIGHTS: Final = 3
"""The stage of ZeRO that divides the weights."""


def checkpointables(engine: Any, *, gather_weights: bool = False) -> dict[str, object]:
    """Return the objects that make up the state of an engine, to save, to check, or to load into.

    Args:
        engine: the engine that ``deepspeed.initialize`` returned, on every process of the job.
        gather_weights: True to save the weights of ZeRO 3 as whole arrays, in files that other software opens. The
            first process then gathers them in its host memory.

    Raises:
        NotImplementedError: the engine has a state that cannot be saved. Names the state and the remedy.
        CheckpointError: ``engine.offload_states`` has moved states away.
    """
    _refuse_unsupported(engine)
    if getattr(engine.optimizer, "offloaded_states", None):
        raise CheckpointError(
            "the engine of DeepSpeed has offloaded states: call engine.reload_states() before a save or a load"
        )
    objects: dict[str, object] = {"model": Weights(engine, gather_weights)}
    if type(engine.optimizer) in OPTIMIZERS:
        objects["optimizer"] = OptimizerState(engine)
        if not steps_weights(engine):
            objects["fp32_weights"] = SteppedWeights(engine)
    elif isinstance(engine.optimizer, torch.optim.Optimizer):
        objects["optimizer"] = NamedOptimizer(engine.module, engine.optimizer)
    return {**objects, "engine": _EngineState(engine)}


def with_engines(context: Context | None = None) -> Context:
    """Return a Context that also has the handlers of the objects of `checkpointables`."""
    if context is None:
        return _default_context()
    handlers = {**context.plugins.handlers, **_HANDLERS}
    return dataclasses.replace(context, plugins=dataclasses.replace(context.plugins, handlers=handlers))


@functools.cache
def _default_context() -> Context:
    return with_engines(Context())


class Engines:
    """The kind of training with DeepSpeed: a `ckptcore_integrations.training_kinds.TrainingKind`."""

    is_whole = False

    def __init__(self, *, gather_weights: bool = False) -> None:
        """Choose how weights are saved.

        Args:
            gather_weights: True to save the same weights as the Trainer: whole weights if the configuration of
                DeepSpeed requests them; for a model with adapters, only tensors that the training may change.
        """
        self._gather = gather_weights
        self.context: Context | None = with_engines()

    def model(self, model: Any) -> object:
        """Return the weights of an engine."""
        _refuse_unsupported(model)
        if self._gather and has_adapters(model.module):
            return Weights(model, gather=False, names=frozenset(adapter_tensors(model.module)))
        return Weights(model, gather=self._gathers(model))

    def _gathers(self, engine: Any) -> bool:
        return self._gather and has_sharded_weights(engine) and engine.zero_gather_16bit_weights_on_model_save()

    def optimizer(self, model: Any, optimizer: Any) -> object:
        """Return the state of the engine's optimizer."""
        return checkpointables(model).get("optimizer", {})

    def others(self, model: Any) -> dict[str, object]:
        """Return the other objects of an engine."""
        objects = checkpointables(model)
        return {name: value for name, value in objects.items() if name not in ("model", "optimizer")}

    def schedulers(self, schedulers: Sequence[Any]) -> list[Any]:
        """Return the schedulers that are not part of an engine."""
        from accelerate.utils import DeepSpeedSchedulerWrapper  # engines do not need Accelerate

        return [scheduler for scheduler in schedulers if not isinstance(scheduler, DeepSpeedSchedulerWrapper)]

    def state_dicts(self, *models: Any) -> AbstractContextManager[None]:
        """Return a context that changes nothing."""
        return nullcontext()

    def sizes_of_weights(self, model: Any) -> Mapping[str, int] | None:
        """Return the sizes of the weights, or None if they are saved in slices."""
        if has_adapters(model.module) or (has_sharded_weights(model) and not self._gathers(model)):
            return None
        if not has_sharded_weights(model):
            state = model.module.state_dict()
            return {name: tensor.nbytes for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
        return {
            name: held.ds_numel * held.element_size() if hasattr(held, "ds_id") else held.nbytes
            for name, held in named_weights(Weights(model, gather=True))
        }


def _refuse_unsupported(engine: Any) -> None:
    zero, optimizer = engine._config.zero_config, engine.optimizer
    kind, basic = type(optimizer), type(getattr(optimizer, "optimizer", optimizer))
    known = kind in (*OPTIMIZERS, DeepSpeedZeRoOffload) or isinstance(optimizer, torch.optim.Optimizer | None)
    offloaded = [offload for offload in (zero.offload_optimizer, zero.offload_param) if offload is not None]
    divides_weights = zero.stage == _STAGE_OF_WEIGHTS
    quantized = zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights
    unsupported = {
        "pipeline parallelism (PipelineEngine)": isinstance(engine, PipelineEngine),
        "mixtures of experts (deepspeed.moe)": engine.has_moe_layers,
        "tensor parallelism": engine.mp_world_size > 1 or engine.autotp_size() > 1,
        f"ZeRO with {kind.__name__}": not known,
        f"the optimizer {basic.__name__}": ".onebit." in basic.__module__ or ".muon." in basic.__module__,
        "offload to NVMe": any(offload.device == "nvme" for offload in offloaded),
        "offload_optimizer.ratio": zero.stage == _STAGE_OF_WEIGHTS
        and any(getattr(of, "ratio", 1.0) != 1.0 for of in offloaded),
        "ZeRO++ (zero_hpz_partition_size, zero_quantized_weights, zero_quantized_nontrainable_weights)": (
            divides_weights and (zero.zero_hpz_partition_size > 1 or quantized)
        ),
        "ZeRO within groups of processes": engine.seq_dp_world_size != comm.get_world_size(),
        "curriculum learning": engine.curriculum_learning_enabled(),
        "random layer token dropping": engine.random_ltd_enabled(),
    }
    for name, used in unsupported.items():
        if used:
            raise NotImplementedError(
                f"ckptcore does not save the state of {name} with DeepSpeed. Turn it off in the configuration of "
                "DeepSpeed, or let DeepSpeed write its own files: train without CheckpointMixin, or call "
                "engine.save_checkpoint(directory)"
            )


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
        """Return the request. The schedule and the loss scale are requested as stored: not every stage has both."""
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
        """Return a function that restores the present state."""
        state = copy.deepcopy(_state_of(target.engine))
        return lambda: self.restore(target, state)

    def restore(self, target: _EngineState, state: Any) -> None:
        """Set the counters, and load the schedule and the loss scale.

        A static loss scale is an option of the engine, and is not changed.
        """
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
    Weights: WeightsHandler(),
    SteppedWeights: SteppedWeightsHandler(),
    OptimizerState: OptimizerStateHandler(),
    _EngineState: _EngineStateHandler(),
}
