"""Checkpointable handler of `ZeroRedundancyOptimizer`. Each process holds the states of some of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from ckptcore import PLACEHOLDER
from ckptcore.errors import UnsupportedLeafError
from ckptcore.protocols import CheckpointableHandler, Priority
from ckptcore_torch.copies import OptimizerCopy
from ckptcore_torch.optimizers import OptimizerHandler

_NUMBERED = OptimizerHandler()


class ZeroOptimizerHandler(CheckpointableHandler):
    """Handler of `ZeroRedundancyOptimizer`. The stored state is the state dict of the divided optimizer.

    Every process saves the states of its own parameters, and loads the states of the parameters
    that it owns at load time. No process gathers the whole state, so `consolidate_state_dict` is
    not needed. The state can be loaded with any number of processes, and also into an undivided
    optimizer of the same class.
    """

    priority = Priority.FRAMEWORK

    def flatten(self, value: ZeroRedundancyOptimizer) -> object:
        """Return the groups, and the states of the parameters of this process by their numbers in all groups.

        Raises:
            UnsupportedLeafError: with ``overlap_with_ddp=True``, before the first steps.
        """
        _expect_initialized(value)
        # Take the options from the outer groups: a scheduler changes them, and only the next step
        # copies them to the inner optimizer.
        groups = torch.optim.Optimizer.state_dict(value)["param_groups"]
        numbers = _numbers(value)
        state = {numbers[parameter]: slots for parameter, slots in value.optim.state.items() if parameter in numbers}
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def flatten_to_load(self, value: ZeroRedundancyOptimizer, stored: object) -> object:
        """Return a request for the states of the parameters of this process, and placeholders for the other states."""
        _expect_initialized(value)
        whole = _Whole(value)
        request: Any = _NUMBERED.flatten_to_load(whole, stored)
        own = {numbers: parameter for parameter, numbers in _numbers(value).items()}
        states = request["state"] if isinstance(request, Mapping) else {}
        for number in states:
            if number not in own or _rank_of(value, own[number]) != value.rank:
                states[number] = PLACEHOLDER
        return request

    def unflatten(self, like: ZeroRedundancyOptimizer, state: Any) -> object:
        """Return the state of this process's parameters."""
        return {**state, "state": _without_placeholders(state["state"])}

    def restore(self, target: ZeroRedundancyOptimizer, state: Any) -> None:
        """Load the states of this process's parameters into its inner optimizer, and the options into both."""
        whole = _Whole(target)
        _NUMBERED.restore(whole, {**state, "state": _without_placeholders(state["state"])})
        target.optim.state.clear()
        target.optim.state.update(whole.state)
        untyped: Any = target  # PyTorch leaves its private attributes untyped
        untyped._sync_param_groups(whole.param_groups, target.param_groups)
        untyped._sync_param_groups(target.param_groups, target.optim.param_groups)

    def may_refuse(self, target: ZeroRedundancyOptimizer, request: object) -> bool:
        """Return False, because `restore` does not call the optimizer's own ``load_state_dict``."""
        return False

    def undo(self, target: ZeroRedundancyOptimizer) -> Callable[[], None]:
        """Return a function that restores the current state of this process."""
        return OptimizerCopy(target.optim).restore


class _Whole(torch.optim.Optimizer):
    """An optimizer of all parameters that holds the states of this process. Used only to load; it makes no steps."""

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        """Refer to the groups and states of a divided optimizer."""
        super().__init__([dict(group) for group in zero.param_groups], zero.defaults)
        self.state.update(zero.optim.state)
        self.__class__ = _whole_like(type(zero.optim))


def _whole_like(kind: type[torch.optim.Optimizer]) -> type[_Whole]:
    """Return a subclass of `_Whole` and of the optimizer class. Requests then have the state shapes of that class."""
    return type(kind.__name__, (_Whole, kind), {})


def _numbers(zero: ZeroRedundancyOptimizer) -> dict[torch.Tensor, int]:
    """Return the number of each parameter in all groups."""
    parameters = [parameter for group in zero.param_groups for parameter in group["params"]]
    return {parameter: number for number, parameter in enumerate(parameters)}


def _rank_of(zero: Any, parameter: torch.Tensor) -> int:
    """Return the rank that has the state of a parameter."""
    rank: int = zero._param_to_rank[parameter]
    return rank


def _without_placeholders(states: Mapping[Any, Any]) -> dict[Any, Any]:
    return {number: slots for number, slots in states.items() if slots is not PLACEHOLDER}


def _expect_initialized(zero: Any) -> None:
    try:
        zero._check_overlap_initialized()
    except RuntimeError as error:
        raise UnsupportedLeafError(f"the optimizer of this process does not exist yet: {error}") from error
