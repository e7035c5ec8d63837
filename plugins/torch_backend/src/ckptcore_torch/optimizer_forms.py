"""Stored forms of an optimizer's state that identify parameters by name, and their conversions.

The forms differ in how they store the groups. All store the state of each parameter under its name.

- nested: a list of groups, ``[{option: value, ..., "params": names}]``, the default of torch. - by
name: ``{name: {option: value}}``. If processes hold different parameters, their mappings have
different keys and can be merged. A layout that joins keys by dots, such as ``dcp``, stores the keys
of the flat form. - flat: torch with ``flatten_optimizer_state_dict=True``. Keys are
``state.<parameter>.<slot>`` and ``param_groups.<parameter>.<option>``. Every option is repeated for
each parameter. A slot that is a dict is flattened with further dots (torch 2.13.0,
``checkpoint/state_dict.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from ckptcore import PLACEHOLDER
from ckptcore.errors import TreeMismatchError

_STATE: Final = "state"
_GROUPS: Final = "param_groups"
_MAX_DEPTH: Final = 100
"""Maximum depth of nested dicts in a slot."""


class StoredForm(Protocol):
    """Conversion between a stored form and the nested form."""

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
class _GroupList:
    """The nested form or an unknown form. Neither of them is converted."""

    def nested(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        return state

    def as_stored(self, nested: Mapping[str, Any]) -> Mapping[str, Any]:
        return nested


@dataclass(frozen=True, slots=True)
class OptionsByName:
    """The form by name: ``{"state": {name: slots}, "param_groups": {name: {option: value}}}``."""

    def nested(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the nested form, with a group for each parameter.

        Keeps invalid options: a later check rejects them.
        """
        groups = [
            {**options, "params": [name]} if isinstance(options, Mapping) else options
            for name, options in state[_GROUPS].items()
        ]
        return {**state, _GROUPS: groups}

    def as_stored(self, nested: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of each group under the names of its parameters. Drops groups without parameters."""
        options = {name: group_options(group) for group in nested[_GROUPS] for name in group["params"]}
        return {**nested, _GROUPS: options}


@dataclass(frozen=True, slots=True)
class _FlatKeys:
    """The flat form.

    Attributes:
        paths: for each key, the section, the name of the parameter, and the keys inside its state
            or options.
    """

    paths: Mapping[str, tuple[str, str, tuple[str, ...]]]

    def nested(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """Return the nested form, with one group for each parameter.

        Raises:
            TreeMismatchError: if one key extends another, as ``state.w.x.y`` extends ``state.w.x``.
        """
        parts: dict[str, dict[str, Any]] = {_STATE: {}, _GROUPS: {}}
        for key, (section, name, path) in self.paths.items():
            node = parts[section].setdefault(name, {})
            for step in path[:-1]:
                node = node.setdefault(step, {}) if isinstance(node, dict) else None
            if not isinstance(node, dict) or path[-1] in node:
                raise _mismatch(key, "conflicts with other entries, which form a dict of this key")
            node[path[-1]] = flat[key]
        groups = [{**options, "params": [name]} for name, options in parts[_GROUPS].items()]
        return {_STATE: parts[_STATE], _GROUPS: groups}

    def as_stored(self, nested: Mapping[str, Any]) -> dict[str, Any]:
        """Return the flat form of a nested state, as `nested` returns it: each group has one parameter."""
        groups = {group["params"][0]: group for group in nested[_GROUPS]}
        flat: dict[str, Any] = {}
        for key, (section, name, path) in self.paths.items():
            node: Any = nested[_STATE] if section == _STATE else groups
            for step in (name, *path):
                node = node[step]
            flat[key] = node
        return flat


def form_of(state: Mapping[Any, Any], names: Collection[str]) -> StoredForm:
    """Return the form of a stored state. An unknown form counts as nested.

    Args:
        state: the stored state.
        names: names of the optimizer's parameters.

    Raises:
        TreeMismatchError: if it is flat, and an entry belongs to an unknown parameter.
    """
    paths = _parse_flat_keys(state.keys(), names)
    if paths is not None:
        return paths
    return OptionsByName() if isinstance(state.get(_GROUPS), Mapping) else _GroupList()


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group, without the names of its parameters."""
    return {name: option for name, option in group.items() if name not in ("params", "param_names")}


def without_others(stored: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    """Return a stored state without entries of parameters outside `names`. Keep entries that belong to no parameter."""
    if not stored.keys() & {_STATE, _GROUPS}:
        left = set(_keys_of_others(stored.keys(), names))
        return {key: value for key, value in stored.items() if key not in left}
    groups, own = stored.get(_GROUPS), dict(stored)
    others = _others(groups, names)
    if isinstance(groups, Mapping):
        own[_GROUPS] = {name: options for name, options in groups.items() if name not in others}
    elif isinstance(groups, list):
        own[_GROUPS] = [
            _replace_parameters(
                group, [name for name in _parameters(group) if not isinstance(name, str) or name not in others]
            )
            for group in groups
        ]
    if isinstance(stored.get(_STATE), Mapping):
        own[_STATE] = {key: slots for key, slots in stored[_STATE].items() if key not in others}
    return own


def with_others(request: Mapping[str, Any], stored: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    """Extend a request with placeholders for the stored entries that `without_others` removes."""
    if not stored.keys() & {_STATE, _GROUPS}:
        return {**request, **dict.fromkeys(_keys_of_others(stored.keys(), names), PLACEHOLDER)}
    groups, extended = stored.get(_GROUPS), dict(request)
    others = _others(groups, names)
    if isinstance(groups, Mapping) and isinstance(request.get(_GROUPS), Mapping):
        extended[_GROUPS] = {**request[_GROUPS], **dict.fromkeys(others, PLACEHOLDER)}
    elif isinstance(groups, list) and isinstance(request.get(_GROUPS), list):
        pairs = zip(request[_GROUPS], groups, strict=True)
        extended[_GROUPS] = [_replace_parameters(group, list(_parameters(its))) for group, its in pairs]
    if isinstance(stored.get(_STATE), Mapping) and isinstance(request.get(_STATE), Mapping):
        left = {key: PLACEHOLDER for key in stored[_STATE] if key in others}
        extended[_STATE] = {**request[_STATE], **left}
    return extended


def without_placeholders(loaded: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the placeholders of `with_others` from a loaded state."""
    kept = {}
    for key, value in loaded.items():
        if value is not PLACEHOLDER:
            is_part = key in (_STATE, _GROUPS) and isinstance(value, dict)
            kept[key] = {name: held for name, held in value.items() if held is not PLACEHOLDER} if is_part else value
    return kept


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


def _replace_parameters(group: Any, names: list[Any]) -> Any:
    """Return a group with other parameters. Keep an invalid group: a later check rejects it."""
    return {**group, "params": names} if isinstance(group, Mapping) and isinstance(group.get("params"), list) else group


def _parse_flat_keys(keys: Collection[object], names: Collection[str]) -> _FlatKeys | None:
    """Parse the keys of a flat state. Return None if the state is not flat.

    Args:
        keys: stored keys.
        names: names of the optimizer's parameters.

    Raises:
        TreeMismatchError: if an entry belongs to an unknown parameter.
    """
    paths: dict[str, tuple[str, str, tuple[str, ...]]] = {}
    longest = _most_parts(names)
    for key in keys:
        section, rest = _section_of(key)
        if not section:
            return None
        assert isinstance(key, str)  # only strings have a section
        parts = rest.split(".")
        if len(parts) > longest + _MAX_DEPTH:
            raise _mismatch(f"{key[:80]}...", "has too many parts")
        name = _name_in(parts, names, longest)
        if name is None:
            raise _mismatch(key, "belongs to no parameter of the optimizer")
        paths[key] = (section, name, tuple(parts[name.count(".") + 1 :]))
    return _FlatKeys(paths) if paths else None


def _keys_of_others(keys: Collection[object], names: Collection[str]) -> list[str]:
    """Return the keys of a flat state that belong to other parameters."""
    longest = _most_parts(names)
    foreign_keys: list[str] = []
    for key in keys:
        section, rest = _section_of(key)
        if isinstance(key, str) and section and _name_in(rest.split("."), names, longest) is None:
            foreign_keys.append(key)
    return foreign_keys


def _most_parts(names: Collection[str]) -> int:
    return max((name.count(".") + 1 for name in names), default=0)


def _section_of(key: object) -> tuple[str, str]:
    """Split a key into its section and the rest. The section is empty if the key is not from a flat state."""
    section, dot, rest = key.partition(".") if isinstance(key, str) else ("", "", "")
    return (section, rest) if dot and section in (_STATE, _GROUPS) else ("", "")


def _name_in(parts: Sequence[str], names: Collection[str], longest: int) -> str | None:
    """Return the longest parameter name at the start of an entry, because one name can be the prefix of another."""
    # Limit the search to the length of the longest name: a hostile key can have any number of
    # parts.
    for length in range(min(len(parts) - 1, longest), 0, -1):
        name = ".".join(parts[:length])
        if name in names:
            return name
    return None


def _mismatch(key: str, reason: str) -> TreeMismatchError:
    difference = f"{key} is stored and {reason}"
    return TreeMismatchError(
        f"{difference}; use the model and the optimizer that the checkpoint was saved from", [difference]
    )
