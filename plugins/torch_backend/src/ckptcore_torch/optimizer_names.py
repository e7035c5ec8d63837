"""`NamedState`: the state of one optimizer by names of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckptcore.errors import NameCollisionError, UnsupportedLeafError
from ckptcore.model import AbstractArray
from ckptcore_torch.abstracts import abstract_state_like
from ckptcore_torch.names import plain_names
from ckptcore_torch.optimizer_objects import wrapped_objects
from ckptcore_torch.optimizers import OptimizerHandler, numbered_parameters, numbers_parameters, with_parameter_shapes


@dataclass(frozen=True, slots=True)
class NamedState:
    """State of one optimizer by names of parameters, with functions to load it.

    A tied parameter has several names. Its first name is used in `slots` and `groups`.

    Attributes:
        slots: state of each parameter, by name. States without a parameter keep their keys.
        to_fill: `slots`, if their tensors belong to the optimizer so that a load can fill them;
            otherwise empty.
        groups: groups of the state dict, with names as ``params``.
        aliases: the name in `slots` for every name of each parameter, in the order of the
            parameters.
        fit: adapts stored slots to the parameter with this name: returns them with the shapes that
            the parameter needs.
        array: creates the abstract tensor for a stored array in the state of the parameter with
            this name.
        restore: loads slots and groups into the optimizer. They must use the names in `slots`, and
            the number of groups must be the same.
    """

    slots: Mapping[Any, Any]
    to_fill: Mapping[Any, Any]
    groups: list[dict[str, Any]]
    aliases: Mapping[str, str]
    fit: Callable[[str, Any], Any]
    array: Callable[[str, AbstractArray], object]
    restore: Callable[[Mapping[Any, Any], list[dict[str, Any]]], None]


def names_of_parameters(model: torch.nn.Module) -> Mapping[torch.Tensor, Sequence[str]]:
    """Return the plain names of each parameter of a model."""
    names_of: dict[torch.Tensor, list[str]] = {}
    named = list(model.named_parameters(remove_duplicate=False))
    plain = plain_names(model, [name for name, _ in named])
    for name, parameter in named:
        names_of.setdefault(parameter, []).append(plain[name])
    return names_of


def named_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, names_of: Mapping[torch.Tensor, Sequence[str]]
) -> NamedState:
    """Return the state of an optimizer by the names of its parameters in a model.

    Args:
        model: the model.
        optimizer: one of its optimizers. A model can have thousands of them.
        names_of: the names of the model's parameters, see `names_of_parameters`.

    Raises:
        UnsupportedLeafError: if a parameter does not belong to the model, if the state dict does
            not number the parameters, or if it has entries other than states and groups.
        NameCollisionError: if a state without a parameter has the name of a parameter.
    """
    state = wrapped_objects(optimizer, optimizer.state_dict())
    if not numbers_parameters(state):
        raise UnsupportedLeafError(
            f"the state dict of this {type(optimizer).__name__} does not number its parameters, for example because "
            "torch.distributed.checkpoint has patched it; save the optimizer itself instead of a NamedOptimizer"
        )
    if others := sorted(map(str, state.keys() - {"state", "param_groups"})):
        raise UnsupportedLeafError(
            f"the state dict of the {type(optimizer).__name__} also has {', '.join(others)}, which "
            "cannot be saved by names; save the optimizer itself instead of a NamedOptimizer"
        )
    numbers = numbered_parameters(optimizer, state)
    _expect_names(model, optimizer, names_of)
    parameters = {names_of[parameter][0]: parameter for parameter in numbers}
    name_of = {number: names_of[parameter][0] for parameter, number in numbers.items()}
    number_of = {name: number for number, name in name_of.items()}
    for key in state["state"]:
        if key in number_of:
            raise NameCollisionError(
                f"the {type(optimizer).__name__} has a state with the key {key!r}, which is also "
                "the name of a parameter; rename one of them"
            )

    def restore(slots: Mapping[Any, Any], groups: list[dict[str, Any]]) -> None:
        own = state["param_groups"]
        numbered = [{**group, "params": its["params"]} for group, its in zip(groups, own, strict=True)]
        by_number = {number_of.get(key, key): value for key, value in slots.items()}
        OptimizerHandler().restore(optimizer, {**state, "state": by_number, "param_groups": numbered})

    slots = {name_of.get(key, key): held for key, held in state["state"].items()}
    return NamedState(
        slots=slots,
        to_fill=slots,
        groups=[{**group, "params": [name_of[key] for key in group["params"]]} for group in state["param_groups"]],
        aliases={alias: name for name, parameter in parameters.items() for alias in names_of[parameter]},
        fit=lambda name, stored: with_parameter_shapes(optimizer, parameters[name], stored),
        array=lambda name, stored: abstract_state_like(parameters[name], stored),
        restore=restore,
    )


def _expect_names(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, object]
) -> None:
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter not in names:
                raise UnsupportedLeafError(
                    f"parameter {position} of group {number} of the "
                    f"{type(optimizer).__name__}, with the shape {tuple(parameter.shape)}, has no "
                    f"name, because it is not in the {type(model).__qualname__}; pass the right "
                    "model, or save the optimizer itself instead of a NamedOptimizer"
                )
