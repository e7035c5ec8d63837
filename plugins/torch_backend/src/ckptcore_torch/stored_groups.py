"""The forms in which the groups of an optimizer's state by names are stored: a list of groups, options by parameter, or flat.

A list of groups is what torch gives unless asked otherwise: ``[{option: value, ..., "params": names}]``. By parameter it is
``{name: {option: value}}``, which processes with different parameters unite by key. Its entries have the names of the flat form of torch
(see `flattened_states`) where a layout joins keys by dots, as ``dcp`` does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from ckptcore import PLACEHOLDER
from ckptcore_torch.flattened_states import flat_places, of_others

__all__ = [
    "OptionsByName",
    "StoredForm",
    "form_of",
    "group_options",
    "with_others",
    "without_others",
    "without_placeholders",
]

_STATE: Final = "state"
_GROUPS: Final = "param_groups"


class StoredForm(Protocol):
    """How a state by names is stored, and how it is with a list of groups."""

    def nested(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """What is stored, with a list of groups.

        Raises:
            TreeMismatchError: if entries exclude each other.
        """
        ...

    def as_stored(self, nested: Mapping[str, Any]) -> Mapping[str, Any]:
        """In this form, what is like a result of `nested`."""
        ...


@dataclass(frozen=True, slots=True)
class _Listed:
    """A list of groups already, or nothing that is known."""

    def nested(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        return state

    def as_stored(self, nested: Mapping[str, Any]) -> Mapping[str, Any]:
        return nested


@dataclass(frozen=True, slots=True)
class OptionsByName:
    """The options of each parameter under its name: ``{"state": {name: slots}, "param_groups": {name: {option: value}}}``."""

    def nested(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """With a group for each parameter; what has not the form of options stays, so that it is refused."""
        groups = [
            {**options, "params": [name]} if isinstance(options, Mapping) else options
            for name, options in state[_GROUPS].items()
        ]
        return {**state, _GROUPS: groups}

    def as_stored(self, nested: Mapping[str, Any]) -> dict[str, Any]:
        """The options of each group under the name of every parameter in it. A group without parameters has no place."""
        options = {name: group_options(group) for group in nested[_GROUPS] for name in group["params"]}
        return {**nested, _GROUPS: options}


def form_of(state: Mapping[Any, Any], names: Collection[str]) -> StoredForm:
    """The form of a stored state; what has none of them is taken for a list of groups.

    Args:
        state: what is stored.
        names: those of the parameters of the optimizer.

    Raises:
        TreeMismatchError: if it is flat, and an entry is of a parameter that the optimizer has not.
    """
    places = flat_places(state.keys(), names)
    if places is not None:
        return places
    return OptionsByName() if isinstance(state.get(_GROUPS), Mapping) else _Listed()


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group, without the names of its parameters."""
    return {name: option for name, option in group.items() if name not in ("params", "param_names")}


def without_others(stored: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    """What is stored, in its form, without what is of parameters of other names; what is of no parameter stays."""
    if not stored.keys() & {_STATE, _GROUPS}:
        left = set(of_others(stored.keys(), names))
        return {key: value for key, value in stored.items() if key not in left}
    groups, own = stored.get(_GROUPS), dict(stored)
    others = _others(groups, names)
    if isinstance(groups, Mapping):
        own[_GROUPS] = {name: options for name, options in groups.items() if name not in others}
    elif isinstance(groups, list):
        own[_GROUPS] = [
            _with_parameters(
                group, [name for name in _parameters(group) if not isinstance(name, str) or name not in others]
            )
            for group in groups
        ]
    if isinstance(stored.get(_STATE), Mapping):
        own[_STATE] = {key: slots for key, slots in stored[_STATE].items() if key not in others}
    return own


def with_others(asked: Mapping[str, Any], stored: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    """What is asked for of a result of `without_others`, with placeholders for the rest of what is stored."""
    if not stored.keys() & {_STATE, _GROUPS}:
        return {**asked, **dict.fromkeys(of_others(stored.keys(), names), PLACEHOLDER)}
    groups, found = stored.get(_GROUPS), dict(asked)
    others = _others(groups, names)
    if isinstance(groups, Mapping) and isinstance(asked.get(_GROUPS), Mapping):
        found[_GROUPS] = {**asked[_GROUPS], **dict.fromkeys(others, PLACEHOLDER)}
    elif isinstance(groups, list) and isinstance(asked.get(_GROUPS), list):
        pairs = zip(asked[_GROUPS], groups, strict=True)
        found[_GROUPS] = [_with_parameters(group, list(_parameters(its))) for group, its in pairs]
    if isinstance(stored.get(_STATE), Mapping) and isinstance(asked.get(_STATE), Mapping):
        left = {key: PLACEHOLDER for key in stored[_STATE] if key in others}
        found[_STATE] = {**asked[_STATE], **left}
    return found


def without_placeholders(loaded: Mapping[str, Any]) -> dict[str, Any]:
    """What was loaded of a result of `with_others`, without what was not."""
    found = {}
    for key, value in loaded.items():
        if value is not PLACEHOLDER:
            is_part = key in (_STATE, _GROUPS) and isinstance(value, dict)
            found[key] = {name: held for name, held in value.items() if held is not PLACEHOLDER} if is_part else value
    return found


def _others(groups: object, names: Collection[str]) -> Collection[str]:
    """The names of parameters in stored groups that are none of `names`, in their order."""
    if isinstance(groups, Mapping):
        return {name: None for name in groups if isinstance(name, str) and name not in names}.keys()
    listed = groups if isinstance(groups, list) else []
    listed_names = [name for group in listed for name in _parameters(group) if isinstance(name, str)]
    return {name: None for name in listed_names if name not in names}.keys()


def _parameters(group: object) -> Sequence[Any]:
    parameters = group.get("params") if isinstance(group, Mapping) else None
    return parameters if isinstance(parameters, list) else []


def _with_parameters(group: Any, names: list[Any]) -> Any:
    """A group with other parameters; what has not the form of one as it is, so that it is refused."""
    return {**group, "params": names} if isinstance(group, Mapping) and isinstance(group.get("params"), list) else group
