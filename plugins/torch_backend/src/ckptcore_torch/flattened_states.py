"""The flat form of an optimizer's state dict by names, which torch returns with ``flatten_optimizer_state_dict=True``.

Keys are ``state.<parameter>.<slot>`` and ``param_groups.<parameter>.<option>``. Every option is
repeated for each parameter, and a slot that is a dict is flattened with further dots (torch 2.13.0,
``checkpoint/state_dict.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ckptcore.errors import TreeMismatchError

__all__ = ["FlatKeys", "keys_of_others", "parse_flat_keys"]

_STATE: Final = "state"
_GROUPS: Final = "param_groups"
_DEEPEST: Final = 100
"""Maximum depth of nested dicts in a slot."""


@dataclass(frozen=True, slots=True)
class FlatKeys:
    """Positions in the nested form for the entries of a flat state dict.

    Attributes:
        places: by key, the section, the name of the parameter, and the keys within its part.
    """

    places: Mapping[str, tuple[str, str, tuple[str, ...]]]

    def nested(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """Return the nested form, with one group for each parameter.

        Raises:
            TreeMismatchError: if an entry has the key of a dict of other entries.
        """
        parts: dict[str, dict[str, Any]] = {_STATE: {}, _GROUPS: {}}
        for key, (section, name, path) in self.places.items():
            node = parts[section].setdefault(name, {})
            for step in path[:-1]:
                node = node.setdefault(step, {}) if isinstance(node, dict) else None
            if not isinstance(node, dict) or path[-1] in node:
                raise _misfit(key, "conflicts with other entries, which have a dict there")
            node[path[-1]] = flat[key]
        groups = [{**options, "params": [name]} for name, options in parts[_GROUPS].items()]
        return {_STATE: parts[_STATE], _GROUPS: groups}

    def as_stored(self, nested: Mapping[str, Any]) -> dict[str, Any]:
        """Return the flat form of a nested state dict, such as a result of `nested`."""
        groups = {group["params"][0]: group for group in nested[_GROUPS]}
        found: dict[str, Any] = {}
        for key, (section, name, path) in self.places.items():
            node: Any = nested[_STATE] if section == _STATE else groups
            for step in (name, *path):
                node = node[step]
            found[key] = node
        return found


def parse_flat_keys(keys: Collection[object], names: Collection[str]) -> FlatKeys | None:
    """Parse the keys of a flat state dict. Return None if they do not form one.

    Args:
        keys: stored keys.
        names: names of the optimizer's parameters.

    Raises:
        TreeMismatchError: if an entry belongs to an unknown parameter.
    """
    places: dict[str, tuple[str, str, tuple[str, ...]]] = {}
    longest = _most_parts(names)
    for key in keys:
        section, rest = _section_of(key)
        if not section:
            return None
        assert isinstance(key, str)  # otherwise there is no section
        parts = rest.split(".")
        if len(parts) > longest + _DEEPEST:
            raise _misfit(f"{key[:80]}...", "has too many parts")
        name = _name_in(parts, names, longest)
        if name is None:
            raise _misfit(key, "belongs to no parameter of the optimizer")
        places[key] = (section, name, tuple(parts[name.count(".") + 1 :]))
    return FlatKeys(places) if places else None


def keys_of_others(keys: Collection[object], names: Collection[str]) -> list[str]:
    """Return the keys of a flat state dict that belong to other parameters."""
    longest = _most_parts(names)
    found: list[str] = []
    for key in keys:
        section, rest = _section_of(key)
        if isinstance(key, str) and section and _name_in(rest.split("."), names, longest) is None:
            found.append(key)
    return found


def _most_parts(names: Collection[str]) -> int:
    return max((name.count(".") + 1 for name in names), default=0)


def _section_of(key: object) -> tuple[str, str]:
    """Split a key into its section and the rest.

    The section is empty if the key is not of a flat state dict.
    """
    section, dot, rest = key.partition(".") if isinstance(key, str) else ("", "", "")
    return (section, rest) if dot and section in (_STATE, _GROUPS) else ("", "")


def _name_in(parts: Sequence[str], names: Collection[str], longest: int) -> str | None:
    """Return the longest parameter name at the start of an entry, because one name can be the prefix of another."""
    # Bounded by the longest name, because a key can have any length.
    for length in range(min(len(parts) - 1, longest), 0, -1):
        name = ".".join(parts[:length])
        if name in names:
            return name
    return None


def _misfit(key: str, reason: str) -> TreeMismatchError:
    difference = f"{key} is stored and {reason}"
    return TreeMismatchError(
        f"{difference}; use the model and the optimizer that the checkpoint was saved from", [difference]
    )
