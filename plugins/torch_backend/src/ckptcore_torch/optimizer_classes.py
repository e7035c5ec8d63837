"""Detection of states that another class of optimizer saved, by their options and parameter states.

A stored state does not contain the name of its class, and PyTorch loads the state of any class. An
SGD would take the learning rate and the moments of an AdamW, and an optimizer that needs more
entries in the state of a parameter would fail in its next step.

The order of parameters in the groups of two states is compared by their ``param_names``. PyTorch stores
``param_names`` if an optimizer was created with `Module.named_parameters`, and its ``load_state_dict`` ignores them
(torch 2.13.0, ``optim/optimizer.py``).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

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
    """Return groups in the order of `others`, which also gives the order of the parameters in each group.

    Names are compared without the parts of wrappers.

    Args:
        groups: groups with parameter names.
        others: groups with the same names.
        optimizer: name of the optimizer's type, for errors.

    Raises:
        TreeMismatchError: if the names differ, or if the same names are divided into other groups.
    """
    other_names, expected = (_names_by_group(its) for its in (others, groups))
    differences = [
        *[f"{name!r} is only in the checkpoint" for name in _united(other_names) if name not in _united(expected)],
        *[f"{name!r} is only in the optimizer" for name in _united(expected) if name not in _united(other_names)],
    ]
    if not differences and set(other_names) != set(expected):
        differences = [
            f"the group of {next(iter(names))!r} has other parameters"
            for names in expected
            if names not in set(other_names)
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
    return [_reordered(by_names[names], other) for names, other in zip(other_names, others, strict=True)]


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


_OF_ANY_CLASS: Final = frozenset(
    ("adjust_lr_fn", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "maximize")
)
"""Options that versions of PyTorch added to classes that existed before."""

_OF_GROUPS: Final = frozenset((
    "base_momentum", "initial_lr", "k", "lr", "max_lr", "max_momentum", "min_lr", "name", "param_names", "params",
    "step", "swa_lr", "weight_decay",
))  # fmt: skip
"""Entries of groups that nearly all classes have, or that steps, schedulers and programs add."""

_ANY: Final = _OF_ANY_CLASS | _OF_GROUPS

_ADDED: Final = 4
"""Number of options by which two versions of a class may differ even if they have few options in common."""

_SHOWN: Final = 4
"""Maximum number of differences in the text of an error."""

_STATES: Final[Mapping[str, tuple[str, str]]] = {
    "ASGD": ("ax eta mu step", ""),
    "Adadelta": ("acc_delta square_avg step", ""),
    "Adafactor": ("step", "col_var row_var variance"),
    "Adagrad": ("step sum", ""),
    "Adam": ("exp_avg exp_avg_sq step", "max_exp_avg_sq"),
    "AdamW": ("exp_avg exp_avg_sq step", "max_exp_avg_sq"),
    "Adamax": ("exp_avg exp_inf step", ""),
    "Muon": ("momentum_buffer", ""),
    "NAdam": ("exp_avg exp_avg_sq mu_product step", ""),
    "RAdam": ("exp_avg exp_avg_sq step", ""),
    "RMSprop": ("square_avg step", "grad_avg momentum_buffer"),
    "Rprop": ("prev step step_size", ""),
    "SGD": ("", "momentum_buffer"),
    "SparseAdam": ("exp_avg exp_avg_sq step", ""),
}
"""The state of a parameter in the optimizers of torch 2.13.0: entries that it always has, and others."""


_FLAGS: Final = frozenset(("capturable", "differentiable", "foreach", "fused", "maximize"))
"""Options of PyTorch's own loops, which classes of other libraries do not have."""


def refuse_other_class(
    optimizer: torch.optim.Optimizer,
    own_states: Iterable[object],
    stored_groups: Sequence[object],
    stored_states: Iterable[object],
    *,
    by_name: bool = False,
) -> None:
    """Raise an error if another class of optimizer saved the stored state.

    Two versions of a class may have different options, and programs may add entries to groups and
    states. Such differences are accepted. An optimizer with hooks for loading is not checked here,
    because they may migrate the state of another class: see `refuse_unmigrated`.

    Args:
        optimizer: the optimizer.
        own_states: its current states of parameters.
        stored_groups: the stored groups of its parameters.
        stored_states: the stored states of its parameters.
        by_name: True if the stored state identifies parameters by name. `load_state_dict` does not
            accept such a state, so the error does not suggest it.

    Raises:
        TreeMismatchError: if the class differs. The error names the options and states that differ,
            with their numbers.
    """
    optimizer = _unwrapped(optimizer)
    if _may_migrate(optimizer):
        return
    options = _Options.of(optimizer, stored_groups)
    states = _States.of(optimizer, own_states, stored_states)
    is_other = bool(options) and all(option.is_of_another_class for option in options)
    is_same = bool(options) and not any(option.extra or option.missing for option in options)
    if not (states.are_foreign(same_options=is_same) or (is_other and not states.agree)):
        return
    differences = [*_lines(options), *states.lines()]
    name = type(optimizer).__name__
    anyway = (
        ""
        if by_name or states.lacking
        else f" If its states mean the same, load them unchecked: pass this part of the result of "
        f"ckptcore.load(..., framework='torch') to load_state_dict of the {name}."
    )
    raise TreeMismatchError(
        f"the stored state is that of another class of optimizer than {name}: {'; '.join(differences[:_SHOWN])}. "
        f"Load it into an optimizer of the class that was saved, or put PLACEHOLDER in the place of the {name} to "
        f"start with a new state.{anyway} Nothing was changed",
        differences,
    )


def refuse_unmigrated(optimizer: torch.optim.Optimizer) -> None:
    """Raise an error if an optimizer cannot step, because its hooks for loading did not migrate the loaded state.

    Raises:
        TreeMismatchError: if states lack entries that the class needs. The error names these
            entries.
    """
    optimizer = _unwrapped(optimizer)
    if not _may_migrate(optimizer):
        return
    states = _States.of(optimizer, (), optimizer.state.values())
    if states.lacking:
        differences = list(states.lines())
        name = type(optimizer).__name__
        raise TreeMismatchError(
            f"the hooks of the {name} for loading left the state of another class of optimizer: {differences[0]}. "
            f"Load it into an optimizer of the class that was saved, or register a hook with "
            "register_load_state_dict_pre_hook that returns the state of this class. Nothing was changed",
            differences,
        )


def _may_migrate(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer has hooks that can change a state. Wrappers of other libraries have none."""
    return bool(getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None))


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside a wrapper without its own options and hooks, such as Accelerate's.

    Other optimizers are returned themselves.
    """
    held = vars(optimizer)
    inner = None if "defaults" in held else held.get("optimizer")
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


@dataclass(frozen=True, slots=True)
class _Options:
    """A comparison of a stored group with the options of an optimizer.

    Attributes:
        extra: stored options that the optimizer does not have.
        missing: options of the optimizer that are not stored.
        is_of_another_class: True if no version of the optimizer's class can have saved this group.
    """

    extra: Sequence[str]
    missing: Sequence[str]
    is_of_another_class: bool

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, stored_groups: Iterable[object]) -> list[_Options]:
        """Compare groups with the options of an optimizer, and with the entries that programs added to its groups.

        Groups whose entries all occur in any class are left out. Groups with the same entries are
        compared once.
        """
        defaults = frozenset(map(str, getattr(optimizer, "defaults", None) or ()))
        own = defaults.union(*[map(str, group) for group in optimizer.param_groups])
        name = _class_of_torch(optimizer)
        compared = functools.cache(lambda groups: cls._of_group(defaults, own, groups, is_of_torch=name is not None))
        groups = [frozenset(map(str, group)) for group in stored_groups if isinstance(group, Mapping)]
        return [compared(entries) for entries in groups if entries - _ANY]

    @classmethod
    def _of_group(
        cls, defaults: frozenset[str], own: frozenset[str], entries: frozenset[str], *, is_of_torch: bool
    ) -> _Options:
        missing = defaults - entries - _ANY
        extra = entries - own - _ANY
        is_other = any(not options <= own for options in _classes_of_torch(entries))
        if is_of_torch:
            is_other = is_other or (bool(missing) and (bool(extra) or len(entries & _FLAGS) > 1))
        else:
            is_other = is_other or max(len(missing), len(extra)) > max(len(defaults & entries - _ANY), _ADDED)
        return cls(sorted(extra), sorted(missing), is_other)


def _lines(groups: Sequence[_Options]) -> Iterator[str]:
    """Yield the differences of groups. Groups with the same differences have one line."""
    numbers: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        parts = []
        for names, text in ((group.extra, "stored and not its own"), (group.missing, "its own and not stored")):
            if names:
                verb = "option is" if len(names) == 1 else "options are"
                parts.append(f"{len(names)} {verb} {text} ({', '.join(names)})")
        if parts:
            numbers.setdefault(" and ".join(parts), []).append(number)
    for text, its_numbers in numbers.items():
        yield f"{f'group {its_numbers[0]}' if len(its_numbers) == 1 else f'{len(its_numbers)} groups'}: {text}"


@dataclass(frozen=True, slots=True)
class _States:
    """A comparison of stored parameter states with the states of an optimizer.

    Attributes:
        own: entries that the states of the optimizer have. None if they are unknown, because it has
            made no step.
        stored: entries of the stored states.
        count: the number of stored states.
        is_of_torch: True if the optimizer is of a class of PyTorch.
        lacking: entries that a class of PyTorch needs and stored states lack. Empty if it can step,
            which needs two conditions: one state has all entries, and every state has the step
            count, because PyTorch's loader fails without it.
        are_of_others: True if the states together have all entries of another class of PyTorch, and
            none of the optimizer's class.
    """

    own: frozenset[str] | None
    stored: frozenset[str]
    count: int
    is_of_torch: bool = False
    lacking: frozenset[str] = frozenset()
    are_of_others: bool = False

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, own: Iterable[object], stored: Iterable[object]) -> _States:
        """Compare states. Empty states are ignored."""
        entries = [entry for state in stored if (entry := _entries(state))]
        slots = frozenset[str]().union(*entries)
        name = _class_of_torch(optimizer)
        if name is not None and name in _STATES:
            always, others = (frozenset(text.split()) for text in _STATES[name])
            counts = always & {"step"}
            can_step = any(always <= entry for entry in entries) and all(counts <= entry for entry in entries)
            lacking = frozenset[str]() if can_step else frozenset[str]().union(*[always - entry for entry in entries])
            complete = [frozenset(needs.split()) for needs, _ in _STATES.values() if needs]
            are_of_others = slots.isdisjoint(always | others) and any(needs <= slots for needs in complete)
            return cls(always | (others & slots), slots, len(entries), True, lacking, are_of_others)
        present = frozenset[str]().union(*map(_entries, own))
        return cls(present or None, slots, len(entries), name is not None)

    @property
    def agree(self) -> bool:
        """True if the optimizer is not PyTorch's own and its states have exactly the stored entries.

        For PyTorch's classes, the options are sufficient to detect another class.
        """
        return not self.is_of_torch and bool(self.stored) and self.own == self.stored

    def are_foreign(self, *, same_options: bool) -> bool:
        """Return True if an optimizer of another class saved the states.

        Extra entries do not count, because programs add entries, also to empty states.
        """
        if self.is_of_torch:
            return bool(self.lacking) or (self.are_of_others and not same_options)
        if self.own is None or not self.stored or same_options or self.own <= self.stored or self.stored <= self.own:
            return False
        return self.own & self.stored <= {"step"}

    def lines(self) -> Iterator[str]:
        """Yield the difference of states, if any."""
        if self.own is None or not self.stored:
            return
        if self.lacking and self.own <= self.stored:
            yield f"states of {self.count} parameters: not every one has {', '.join(sorted(self.lacking))}"
        elif self.own != self.stored:
            stored, own = (", ".join(sorted(names)) or "nothing" for names in (self.stored, self.own))
            verb = "is" if len(self.stored) == 1 else "are"
            yield f"states of {self.count} parameters: {stored} {verb} stored instead of {own}"


def _entries(state: object) -> frozenset[str]:
    return frozenset(map(str, state)) if isinstance(state, Mapping) else frozenset()


def _class_of_torch(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the name of the optimizer's class if it is PyTorch's own.

    Return None for other classes, also for subclasses of PyTorch's classes.
    """
    kind = next(kind for kind in type(optimizer).__mro__ if not kind.__module__.startswith("ckptcore_torch."))
    return kind.__name__ if f"{kind.__module__}.".startswith("torch.optim.") else None


def _classes_of_torch(options_of_state: frozenset[str]) -> Iterator[frozenset[str]]:
    """Yield the options of each class of PyTorch that can have written a group.

    The group must have all options of the class, and at least two of its flags, or all if the class
    has fewer.
    """
    for options, flags in _options_of_torch():
        if options <= options_of_state and len(flags & options_of_state) >= min(2, len(flags)):
            yield options


@functools.cache
def _options_of_torch() -> frozenset[tuple[frozenset[str], frozenset[str]]]:
    """Return the options of all classes of PyTorch, and their flags."""
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    names = [
        frozenset(inspect.signature(kind).parameters)
        for kind in kinds
        if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    ]
    return frozenset((of_kind - _ANY, of_kind & _FLAGS) for of_kind in names)
