"""Stored forms of the groups in an optimizer's state by names: a list of groups, options by parameter, or flat.

torch returns a list of groups by default: ``[{option: value, ..., "params": names}]``. By parameter
it is ``{name: {option: value}}``, which merges by key among processes with different parameters.
Its entries have the keys of torch's flat form (see `flattened_states`) if a layout joins keys by
dots, as ``dcp`` does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from ckptcore import PLACEHOLDER
from ckptcore_torch.flattened_states import keys_of_others, parse_flat_keys

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
    """Conversion between a stored form and the nested form with a list of groups."""

    def nested(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert a stored state to the nested form.

        Raises:
            TreeMismatchError: if entries conflict.
        """
        ...

    def as_stored(self, nested: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert a nested state to the stored form."""
        ...


@dataclass(frozen=True, slots=True)
class _Listed:
    """The nested form itself, or an unknown form."""

    def nested(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        return state

    def as_stored(self, nested: Mapping[str, Any]) -> Mapping[str, Any]:
        return nested


@dataclass(frozen=True, slots=True)
class OptionsByName:
    """Options of each parameter under its name.

    ``{"state": {name: slots}, "param_groups": {name: {option: value}}}``
    """

    def nested(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return one group for each parameter.

        Invalid options are kept, so that they cause an error.
        """
        groups = [
            {**options, "params": [name]} if isinstance(options, Mapping) else options
            for name, options in state[_GROUPS].items()
        ]
        return {**state, _GROUPS: groups}

    def as_stored(self, nested: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of each group under the names of its parameters.

        Empty groups are lost.
        """
        options = {name: group_options(group) for group in nested[_GROUPS] for name in group["params"]}
        return {**nested, _GROUPS: options}


def form_of(state: Mapping[Any, Any], names: Collection[str]) -> StoredForm:
    """Return the form of a stored state. An unknown form is treated as nested.

    Args:
        state: the stored state.
        names: names of the optimizer's parameters.

    Raises:
        TreeMismatchError: if it is flat, and an entry belongs to an unknown parameter.
    """
    places = parse_flat_keys(state.keys(), names)
    if places is not None:
        return places
    return OptionsByName() if isinstance(state.get(_GROUPS), Mapping) else _Listed()


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group, without the names of its parameters."""
    return {name: option for name, option in group.items() if name not in ("params", "param_names")}


def without_others(stored: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    """Return a stored state without the entries of other parameters.

    Entries of no parameter are kept.
    """
    if not stored.keys() & {_STATE, _GROUPS}:
        left = set(keys_of_others(stored.keys(), names))
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
    """Extend a request for a result of `without_others` with placeholders for the other stored entries."""
    if not stored.keys() & {_STATE, _GROUPS}:
        return {**asked, **dict.fromkeys(keys_of_others(stored.keys(), names), PLACEHOLDER)}
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
    """Remove the placeholders of `with_others` from a loaded state."""
    found = {}
    for key, value in loaded.items():
        if value is not PLACEHOLDER:
            is_part = key in (_STATE, _GROUPS) and isinstance(value, dict)
            found[key] = {name: held for name, held in value.items() if held is not PLACEHOLDER} if is_part else value
    return found


def _others(groups: object, names: Collection[str]) -> Collection[str]:
    """Return the names of parameters in stored groups that are not in `names`, in order."""
    if isinstance(groups, Mapping):
        return {name: None for name in groups if isinstance(name, str) and name not in names}.keys()
    listed = groups if isinstance(groups, list) else []
    listed_names = [name for group in listed for name in _parameters(group) if isinstance(name, str)]
    return {name: None for name in listed_names if name not in names}.keys()


def _parameters(group: object) -> Sequence[Any]:
    parameters = group.get("params") if isinstance(group, Mapping) else None
    return parameters if isinstance(parameters, list) else []


def _with_parameters(group: Any, names: list[Any]) -> Any:
    """Return a group with other parameters.

    Invalid groups are kept, so that they cause an error.
    """
    return {**group, "params": names} if isinstance(group, Mapping) and isinstance(group.get("params"), list) else group
