"""Counters of Keras' callbacks, and the global random generators: the state of a training besides the model."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, Final

import numpy as np
from keras.callbacks import (  # type: ignore[import-untyped]
    Callback,
    CallbackList,
    EarlyStopping,
    ModelCheckpoint,
    OrbaxCheckpoint,
    ReduceLROnPlateau,
    SwapEMAWeights,
)
from keras.src.callbacks.monitor_callback import MonitorCallback  # type: ignore[import-untyped]

from ckptcore.events import logger_named

logger = logger_named("ckptcore.integrations.keras")

_COUNTERS: Final[Mapping[type, Sequence[str]]] = {
    EarlyStopping: ("wait", "best", "best_epoch", "best_weights", "stopped_epoch"),
    ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    ModelCheckpoint: ("best", "_batches_seen_since_last_saving"),
    OrbaxCheckpoint: ("best", "_batches_seen_since_last_saving", "_total_batches_seen"),
    SwapEMAWeights: ("_ema_weights_in_model",),
}
"""Attributes with the counters of callbacks of Keras 3.15. Other callbacks have no counters."""


def neighbours(callback: Callback, frame: FrameType | None) -> Sequence[Callback]:
    """Return the callbacks of a training, and move `callback` to the end, so that it is called last.

    A save then includes the changes that other callbacks make at the end of an epoch, such as a reduced learning rate.
    A callback has no reference to the other callbacks, so this function finds the `CallbackList` that called the method
    of `frame`.

    Args:
        callback: one of the callbacks.
        frame: the frame of its method.
    """
    while frame is not None and not isinstance(frame.f_locals.get("self"), CallbackList):
        frame = frame.f_back
    owner = frame.f_locals["self"] if frame is not None else None
    if owner is None or callback not in owner.callbacks:
        return [callback]
    # Create a new list, because Keras is iterating over the old one.
    owner.callbacks = [*(other for other in owner.callbacks if other is not callback), callback]
    return tuple(owner.callbacks)


def state_of_counters(callbacks: Iterable[Callback]) -> dict[str, Any]:
    """Return the counters of Keras' callbacks by name, and the `state_dict` of other callbacks that have one."""
    return {name: _state(callback) for name, callback in _named(callbacks).items()}


def load_counters(callbacks: Iterable[Callback], stored: Mapping[str, Any], epoch: int) -> None:
    """Restore the counters of callbacks at the start of an epoch. Warn of callbacks without saved counters."""
    for name, callback in _named(callbacks).items():
        if name not in stored:
            logger.warning("%s has no saved counters, and starts again", name)
        elif _has_state_dict(callback):
            callback.load_state_dict(stored[name])
        else:
            vars(callback).update(stored[name])
            if isinstance(callback, SwapEMAWeights):
                callback.on_epoch_begin(epoch)  # call it again: the callback now knows that the model has the averages
            if isinstance(callback, MonitorCallback) and callback.monitor_op is None:
                callback._set_monitor_op()  # Keras calls it at the end of an epoch, but a batch may compare earlier


class RandomGenerators:
    """The global random generators. Data loaders and Keras' data adapters use them to shuffle."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators.

        Includes PyTorch's generator if PyTorch is imported, whatever the backend.
        """
        states = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
        if (torch := sys.modules.get("torch")) is not None:
            states["torch"] = torch.get_rng_state()
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the states of the generators."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        if "torch" in state and (torch := sys.modules.get("torch")) is not None:
            torch.set_rng_state(torch.as_tensor(state["torch"]))


def _named(callbacks: Iterable[Callback]) -> dict[str, Callback]:
    """Return the callbacks that have a state, by the name of their type. Further callbacks of a type get a number."""
    by_name: dict[str, Callback] = {}
    for callback in callbacks:
        if _has_state_dict(callback) or isinstance(callback, tuple(_COUNTERS)):
            name = type(callback).__name__
            number = sum([other == name or other.startswith(f"{name}_") for other in by_name])
            by_name[f"{name}_{number}" if number else name] = callback
    return by_name


def _has_state_dict(callback: Callback) -> bool:
    return hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")


def _state(callback: Callback) -> Mapping[str, Any]:
    if _has_state_dict(callback):
        state: Mapping[str, Any] = callback.state_dict()
        return state
    names = [name for kind, counters in _COUNTERS.items() if isinstance(callback, kind) for name in counters]
    return {name: getattr(callback, name, None) for name in names}
