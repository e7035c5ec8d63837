"""The flat form of an optimizer's state dict by names, which torch gives with ``flatten_optimizer_state_dict=True``.

Its keys are ``state.<parameter>.<slot>`` and ``param_groups.<parameter>.<option>``: every option once for each parameter, and a
slot that is a dict again by further dots (torch 2.13.0, ``checkpoint/state_dict.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ckptcore.errors import TreeMismatchError

__all__ = ["FlatPlaces", "flat_places", "of_others"]

_STATE: Final = "state"
_GROUPS: Final = "param_groups"
_DEEPEST: Final = 100
"""How deep a slot may be, in dicts within each other."""


@dataclass(frozen=True, slots=True)
class FlatPlaces:
    """Where the entries of a flat state dict stand in a nested one.

    Attributes:
        places: by key, the section, the name of the parameter, and the keys within its part.
    """

    places: Mapping[str, tuple[str, str, tuple[str, ...]]]

    def nested(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """The nested form: with a group for each parameter.

        Raises:
            TreeMismatchError: if an entry stands where others have a dict.
        """
        parts: dict[str, dict[str, Any]] = {_STATE: {}, _GROUPS: {}}
        for key, (section, name, path) in self.places.items():
            node = parts[section].setdefault(name, {})
            for step in path[:-1]:
                node = node.setdefault(step, {}) if isinstance(node, dict) else None
            if not isinstance(node, dict) or path[-1] in node:
                raise _misfit(key, "stands where other entries have a dict")
            node[path[-1]] = flat[key]
        groups = [{**options, "params": [name]} for name, options in parts[_GROUPS].items()]
        return {_STATE: parts[_STATE], _GROUPS: groups}

    def as_stored(self, nested: Mapping[str, Any]) -> dict[str, Any]:
        """The flat form of what is like a result of `nested`."""
        groups = {group["params"][0]: group for group in nested[_GROUPS]}
        found: dict[str, Any] = {}
        for key, (section, name, path) in self.places.items():
            node: Any = nested[_STATE] if section == _STATE else groups
            for step in (name, *path):
                node = node[step]
            found[key] = node
        return found


def flat_places(keys: Collection[object], names: Collection[str]) -> FlatPlaces | None:
    """The places of the entries of a flat state dict; None if keys are not those of one.

    Args:
        keys: of what is stored.
        names: those of the parameters of the optimizer.

    Raises:
        TreeMismatchError: if an entry is of a parameter that the optimizer has not.
    """
    places: dict[str, tuple[str, str, tuple[str, ...]]] = {}
    longest = _most_parts(names)
    for key in keys:
        section, rest = _section_of(key)
        if not section:
            return None
        assert isinstance(key, str)  # else it has no section
        parts = rest.split(".")
        if len(parts) > longest + _DEEPEST:
            raise _misfit(f"{key[:80]}...", "has too many parts")
        name = _name_in(parts, names, longest)
        if name is None:
            raise _misfit(key, "is of no parameter of the optimizer")
        places[key] = (section, name, tuple(parts[name.count(".") + 1 :]))
    return FlatPlaces(places) if places else None


def of_others(keys: Collection[object], names: Collection[str]) -> list[str]:
    """The keys of entries of a flat state dict that are of parameters of other names."""
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
    """The section of an entry and the rest of its key; no section if it is none of a flat state dict."""
    section, dot, rest = key.partition(".") if isinstance(key, str) else ("", "", "")
    return (section, rest) if dot and section in (_STATE, _GROUPS) else ("", "")


def _name_in(parts: Sequence[str], names: Collection[str], longest: int) -> str | None:
    """The longest name of a parameter that an entry begins with: one may be the beginning of another."""
    # No longer than any name is, for the key may be of any length.
    for length in range(min(len(parts) - 1, longest), 0, -1):
        name = ".".join(parts[:length])
        if name in names:
            return name
    return None


def _misfit(key: str, reason: str) -> TreeMismatchError:
    difference = f"{key} is stored and {reason}"
    return TreeMismatchError(
        f"{difference}; give the model and the optimizer that the checkpoint was saved of", [difference]
    )
