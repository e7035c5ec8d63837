"""The order of parameters in the groups of two state dicts of optimizers, by their ``param_names``.

PyTorch stores ``param_names`` if an optimizer was created with `Module.named_parameters`, and its ``load_state_dict``
ignores them (torch 2.13.0, ``optim/optimizer.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptcore.errors import TreeMismatchError
from ckptcore_torch.names import wrapper_parts

_NAMES_SHOWN = 10


def has_parameter_names(groups: object) -> bool:
    """Return True if groups of a state dict have a name for each parameter, and no name is used twice."""
    if not isinstance(groups, list | tuple):
        return False
    names: list[str] = []
    for group in groups:
        if not isinstance(group, Mapping):
            return False
        numbers, own = group.get("params"), group.get("param_names")
        if not isinstance(numbers, list | tuple) or not isinstance(own, list | tuple) or len(numbers) != len(own):
            return False
        if not all(type(number) is int for number in numbers) or not all(isinstance(name, str) for name in own):
            return False
        names += map(_plain, own)
    return len(names) == len(set(names)) > 0


def in_order_of(
    groups: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], optimizer: str
) -> list[dict[str, Any]]:
    """Return groups, and the parameters in each, in the order of the same parameters in `others`.

    Names are compared without the parts of wrappers.

    Args:
        groups: groups with parameter names.
        others: groups with the same names.
        optimizer: name of the optimizer's type, for errors.

    Raises:
        TreeMismatchError: if the names differ, or are in other groups.
    """
    found, expected = (_names_by_group(its) for its in (others, groups))
    differences = [
        *[f"{name!r} is only in the checkpoint" for name in _united(found) if name not in _united(expected)],
        *[f"{name!r} is only in the optimizer" for name in _united(expected) if name not in _united(found)],
    ]
    if not differences and set(found) != set(expected):
        differences = [
            f"the group of {next(iter(names))!r} has other parameters" for names in expected if names not in set(found)
        ]
    if differences:
        raise TreeMismatchError(
            f"the parameters of the {optimizer} are not those of the checkpoint: "
            f"{'; '.join(differences[:_NAMES_SHOWN])}. Create the optimizer with the same parameters in the same "
            "groups; or, if only their names differ, create it with model.parameters(), which has no names: then the "
            "state loads by the position of each parameter",
            differences,
        )
    by_names = dict(zip(expected, groups, strict=True))
    return [_reordered(by_names[names], other) for names, other in zip(found, others, strict=True)]


def _reordered(group: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    places = {_plain(name): place for place, name in enumerate(group["param_names"])}
    order = [places[_plain(name)] for name in other["param_names"]]
    numbers, names = ([group[key][place] for place in order] for key in ("params", "param_names"))
    return {**group, "params": numbers, "param_names": names}


def _names_by_group(groups: Sequence[Mapping[str, Any]]) -> list[frozenset[str]]:
    return [frozenset(map(_plain, group["param_names"])) for group in groups]


def _united(names: Sequence[frozenset[str]]) -> list[str]:
    return sorted(frozenset().union(*names))


def _plain(name: str) -> str:
    return wrapper_parts(name)[1]
