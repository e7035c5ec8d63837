"""`NamedOptimizer`: saves and loads the state of optimizers by the names of a model's parameters."""

from __future__ import annotations

import copy
import functools
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import torch

from ckptcore.errors import NameCollisionError, TreeMismatchError, UnsupportedLeafError
from ckptcore.protocols import CheckpointableHandler, Priority
from ckptcore_torch.abstracts import abstract_tensor
from ckptcore_torch.copies import OptimizerCopy
from ckptcore_torch.optimizer_classes import refuse_other_class
from ckptcore_torch.optimizer_forms import (
    OptionsByName,
    form_of,
    group_options,
    with_others,
    without_others,
    without_placeholders,
)
from ckptcore_torch.optimizer_names import NamedState, named_state, names_of_parameters
from ckptcore_torch.optimizers import OptimizerHandler, options_to_load, parameter_keys, refuse_meta, slots_to_load

_NUMBERED: Final = OptimizerHandler()


class NamedOptimizer:
    """Optimizers and their model. Save and load it instead of an optimizer.

    An optimizer alone identifies its parameters by their position. With names, a checkpoint also
    loads into an optimizer whose parameters have another order, other groups, other wrappers or
    another mesh. The saved state has the form of
    ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``.

    Attributes:
        model: the module, wrapped or not.
        optimizers: optimizers of its parameters. Each parameter belongs to at most one of them.
    """

    __slots__ = ("model", "optimizers")

    def __init__(self, model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Store references to the objects. Saves and loads inspect them.

        Raises:
            TypeError: if there is no optimizer, or an object of another type.
        """
        if not optimizers or not all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizers):
            kinds = ", ".join(type(optimizer).__qualname__ for optimizer in optimizers) or "nothing"
            raise TypeError(
                f"NamedOptimizer(model, optimizer, ...) takes torch.optim.Optimizer objects; found: {kinds}"
            )
        self.model = model
        self.optimizers = optimizers


class NamedOptimizerPart(NamedOptimizer):
    """A `NamedOptimizer` of a process that has only a part of the parameters, such as a pipeline stage.

    The options of each group are saved under the names of its parameters, as torch does with
    ``flatten_optimizer_state_dict=True``. Therefore the parts of all processes merge into one state
    of the whole model's optimizer, whatever their groups are. This state loads into a
    `NamedOptimizer` of the whole model, and into parts of any size. A part loads only the state of
    its own parameters.

    Every process must use the parameter names of the whole model.
    """

    __slots__ = ()


class NamedOptimizerHandler(CheckpointableHandler):
    """Handler of `NamedOptimizer`: ``{"state": {name: slots}, "param_groups": [{option: value, "params": names}]}``.

    A load restores exactly the stored state. It takes no step and changes no parameters. State and
    options are matched by parameter name. A tied parameter is saved under its first name, and
    matches under any of its names. A parameter that was saved without state, because it is frozen
    or had no gradient, has no state after a load.

    A load also accepts the other forms in `optimizer_forms`, and the numbered state dict of a
    single optimizer.
    """

    priority = Priority.FRAMEWORK

    def flatten(self, value: NamedOptimizer) -> object:
        """Return the states of all optimizers by name. The tensors are not copied.

        Raises:
            UnsupportedLeafError: if a parameter has no name, or if one of several optimizers has a
                state that belongs to no parameter.
            NameCollisionError: if two optimizers have the same parameter.
        """
        return self._state_to_save(_named_states(value))

    def flatten_to_load(self, value: NamedOptimizer, stored: object) -> object:
        """Return the request for the state, in its stored form, with the optimizers' tensors to fill.

        Raises:
            TreeMismatchError: if parameters exist only in the checkpoint or only in the optimizers,
                or if parameters of one group were saved with different options. The error lists them. Also raised if
                another class of optimizer saved the state, or if parameters are on the meta device.
        """
        for optimizer in value.optimizers:
            refuse_meta(optimizer)
        if _are_numbered(stored) and len(value.optimizers) == 1:
            return _NUMBERED.flatten_to_load(value.optimizers[0], stored)
        members = _named_states(value)
        known = _aliases(members)
        if not isinstance(stored, Mapping):
            return self._state_to_save(members)
        own = self._known_entries(stored, known)
        form = form_of(own, known)
        nested = form.nested(own)
        if not _is_by_name(nested):
            return self._extend_request(self._state_to_save(members), stored, known)
        _expect_same_parameters(members, nested)
        group_of = _group_numbers(nested["param_groups"])
        for optimizer, member in zip(value.optimizers, members, strict=True):  # raise errors before arrays are read
            sources = _source_groups(member, nested["param_groups"], group_of)
            groups = [nested["param_groups"][number] for numbers in sources for number in numbers]
            slots = [slots for name, slots in (nested.get("state") or {}).items() if name in member.aliases]
            refuse_other_class(optimizer, member.slots.values(), groups, slots, by_name=True)
        request = {
            "state": _slots_to_load(members, nested),
            "param_groups": _groups_to_load(members, nested["param_groups"]),
        }
        return self._extend_request(form.as_stored(request), stored, known)

    def may_refuse(self, target: NamedOptimizer, request: object) -> bool:
        """Return True if one of the optimizers may refuse the state. See `OptimizerHandler`."""
        return any(_NUMBERED.may_refuse(optimizer, request) for optimizer in target.optimizers)

    def undo(self, target: NamedOptimizer) -> Callable[[], None]:
        """Return a function that restores the current states of all optimizers."""
        copies = [OptimizerCopy(optimizer) for optimizer in target.optimizers]

        def restore() -> None:
            for member in copies:
                member.restore()

        return restore

    def unflatten(self, like: NamedOptimizer, state: object) -> object:
        """Return the state itself, for ``set_optimizer_state_dict``."""
        return state

    def restore(self, target: NamedOptimizer, state: Any) -> None:
        """Load the state into each optimizer.

        Raises:
            TreeMismatchError: if parameters of one group were saved with different tensor options.
        """
        if _are_numbered(state) and len(target.optimizers) == 1:
            _NUMBERED.restore(target.optimizers[0], state)
            return
        members = _named_states(target)
        known = _aliases(members)
        own = self._known_entries(state, known)
        nested = form_of(own, known).nested(own)
        _expect_same_parameters(members, nested)
        taken: set[int] = set()
        group_of = _group_numbers(nested["param_groups"])
        prepared = [_member_state(member, nested, group_of, taken, others=len(members) == 1) for member in members]
        # Restore last, so that an error above leaves every optimizer unchanged.
        for member, (slots, groups) in zip(members, prepared, strict=True):
            member.restore(slots, groups)

    def _state_to_save(self, members: Sequence[NamedState]) -> Mapping[str, Any]:
        return _merge(members)

    def _known_entries(self, stored: Mapping[str, Any], known: Collection[str]) -> Mapping[str, Any]:
        """Return the stored entries of the known parameters."""
        return stored

    def _extend_request(
        self, request: Mapping[str, Any], stored: Mapping[str, Any], known: Collection[str]
    ) -> Mapping[str, Any]:
        """Extend a request that covers the result of `_known_entries`, so that it covers all stored entries."""
        return request


class NamedOptimizerPartHandler(NamedOptimizerHandler):
    """Handler of `NamedOptimizerPart`: ``{"state": {name: slots}, "param_groups": {name: {option: value}}}``.

    A load accepts the same forms as `NamedOptimizerHandler`, and ignores entries of other
    parameters.
    """

    def unflatten(self, like: NamedOptimizer, state: Any) -> object:
        """Return the loaded state of this part in its stored form, without the state of other parameters."""
        return without_placeholders(state) if isinstance(state, dict) else state

    def _state_to_save(self, members: Sequence[NamedState]) -> Mapping[str, Any]:
        return OptionsByName().as_stored(_merge(members))

    def _known_entries(self, stored: Mapping[str, Any], known: Collection[str]) -> Mapping[str, Any]:
        return without_others(stored, known)

    def _extend_request(
        self, request: Mapping[str, Any], stored: Mapping[str, Any], known: Collection[str]
    ) -> Mapping[str, Any]:
        return with_others(request, stored, known)


def _named_states(value: NamedOptimizer) -> Sequence[NamedState]:
    # A model under FSDP1 exists only if this module was imported.
    fully_sharded = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if fully_sharded is not None and fully_sharded.FullyShardedDataParallel.fsdp_modules(value.model):
        from ckptcore_torch.fsdp_optimizers import fsdp_named_state

        return [fsdp_named_state(value.model, optimizer) for optimizer in value.optimizers]
    names = names_of_parameters(value.model)
    return [named_state(value.model, optimizer, names) for optimizer in value.optimizers]


def _merge(members: Sequence[NamedState]) -> dict[str, Any]:
    names = _aliases(members)  # raises an error for shared names
    state: dict[Any, Any] = {}
    for member in members:
        for key, slots in member.slots.items():
            if key not in names and len(members) > 1:
                raise UnsupportedLeafError(
                    f"one of {len(members)} optimizers has a state with the key {key!r}, which is not "
                    "the name of a parameter; save that optimizer in a separate NamedOptimizer"
                )
            state[key] = slots
    return {"state": state, "param_groups": [group for member in members for group in member.groups]}


def _aliases(members: Sequence[NamedState]) -> dict[str, NamedState]:
    """Return the optimizer of each parameter, by every name of the parameter."""
    aliases: dict[str, NamedState] = {}
    for member in members:
        for alias in member.aliases:
            if alias in aliases:
                raise NameCollisionError(
                    f"the parameter {alias!r} belongs to two optimizers, but only one state "
                    "can have its name; save each optimizer in a separate NamedOptimizer"
                )
            aliases[alias] = member
    return aliases


def _are_numbered(stored: object) -> bool:
    groups = stored.get("param_groups") if isinstance(stored, Mapping) else None
    return any(isinstance(key, int) for key in parameter_keys(groups))


def _is_by_name(stored: Mapping[Any, Any]) -> bool:
    """Return True if a state has the nested form. Otherwise the core reports the differences."""
    groups, state = stored.get("param_groups"), stored.get("state", {})
    if not isinstance(groups, list) or not isinstance(state, Mapping) or not stored.keys() <= {"state", "param_groups"}:
        return False
    return all(
        isinstance(group, Mapping)
        and isinstance(group.get("params"), list)
        and all(isinstance(name, str) for name in group["params"])
        for group in groups
    )


def _expect_same_parameters(members: Sequence[NamedState], nested: Mapping[str, Any]) -> None:
    known = _aliases(members)
    stored = [key for key in parameter_keys(nested["param_groups"]) if isinstance(key, str)]
    names = [known[name].aliases[name] for name in stored if name in known]
    present = set(names)
    lacking = [name for member in members for name in dict.fromkeys(member.aliases.values()) if name not in present]
    differences = [
        *(f"{name} is in no stored group" for name in lacking),
        *(f"{name} is stored but is not a parameter of the optimizer" for name in stored if name not in known),
        *(f"{name} is stored twice" for name, count in Counter(names).items() if count > 1),
    ]
    if len(members) > 1:
        others = (nested.get("state") or {}).keys() - stored
        differences += [
            f"the state {key!r} belongs to no parameter, and there are several optimizers" for key in others
        ]
    if differences:
        raise TreeMismatchError(
            f"the stored state does not fit the optimizer: {'; '.join(differences[:20])}"
            + (f"; and {len(differences) - 20} more" if len(differences) > 20 else "")
            + "; create the same model and optimizers as for the save, with all optimizers in one "
            "NamedOptimizer",
            differences,
        )


def _slots_to_load(members: Sequence[NamedState], nested: Mapping[str, Any]) -> dict[Any, Any]:
    known = _aliases(members)
    loadable: dict[Any, Any] = {}
    for key, slots in (nested.get("state") or {}).items():
        member = known.get(key)
        if member is None:
            (member,) = members  # `_expect_same_parameters` refuses such a state for several optimizers
            loadable[key] = slots_to_load(member.to_fill.get(key), slots, abstract_tensor)
        else:
            name = member.aliases[key]
            slots = member.fit(name, slots)
            loadable[key] = slots_to_load(member.to_fill.get(name), slots, functools.partial(member.array, name))
    return loadable


def _groups_to_load(members: Sequence[NamedState], stored_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    own_group = {alias: group for member in members for alias, group in _group_of(member).items()}
    owners = [own_group.get(next(iter(group["params"]), "")) for group in stored_groups]
    times = Counter([id(owner) for owner in owners])
    return [
        # Do not fill the tensor options of a group from two stored groups, because their values can
        # be compared only after the read.
        {**options_to_load(owner if owner and times[id(owner)] == 1 else {}, stored), "params": list(stored["params"])}
        for owner, stored in zip(owners, stored_groups, strict=True)
    ]


def _group_of(member: NamedState) -> dict[str, dict[str, Any]]:
    """Return the group of each parameter, by every name of the parameter."""
    by_name = {name: group for group in member.groups for name in group["params"]}
    return {alias: by_name[name] for alias, name in member.aliases.items()}


def _member_state(
    member: NamedState, nested: Mapping[str, Any], group_of: Mapping[str, int], taken: set[int], *, others: bool
) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    """Return the slots and groups of one optimizer from the loaded state of all optimizers.

    Args:
        member: the optimizer.
        nested: the loaded state.
        group_of: see `_group_numbers`.
        taken: numbers of the loaded groups that other groups use already; the options of such a group are copied. This
            call adds the numbers of the groups that it uses.
        others: True to include states without a parameter.
    """
    stored_groups = nested["param_groups"]
    groups = []
    for own, sources in zip(member.groups, _source_groups(member, stored_groups, group_of), strict=True):
        if not sources:
            groups.append(own)  # a group without parameters
            continue
        options = group_options(stored_groups[sources[0]])
        if sources[0] in taken:
            options = copy.deepcopy(options)
        taken.add(sources[0])
        # The names belong to the optimizer, not to the checkpoint.
        its_names = {"param_names": own["param_names"]} if "param_names" in own else {}
        groups.append({**options, **its_names, "params": own["params"]})
    state = nested.get("state") or {}
    slots: dict[Any, Any] = {name: state[alias] for alias, name in member.aliases.items() if alias in state}
    if others:
        slots |= {key: slots for key, slots in state.items() if key not in member.aliases}
    return slots, groups


def _group_numbers(stored_groups: Sequence[Mapping[str, Any]]) -> Mapping[str, int]:
    """Return the number of the stored group of each stored name."""
    return {name: number for number, group in enumerate(stored_groups) for name in group["params"]}


def _source_groups(
    member: NamedState, stored_groups: Sequence[Mapping[str, Any]], numbers: Mapping[str, int]
) -> Sequence[Sequence[int]]:
    """Return, for each group of an optimizer, the numbers of the stored groups that have its parameters.

    Raises:
        TreeMismatchError: if these stored groups have different options. Arrays are compared only
            after they are loaded.
    """
    group_of = {name: numbers[alias] for alias, name in member.aliases.items() if alias in numbers}
    result = []
    for own in member.groups:
        sources = list(dict.fromkeys(group_of[name] for name in own["params"]))
        for source in sources[1:]:
            options, others = group_options(stored_groups[sources[0]]), group_options(stored_groups[source])
            names = sorted(options.keys() | others.keys())
            differing = [
                f"{name} {_format_option(options, name)} and {_format_option(others, name)}"
                for name in names
                if not _equal_options(options.get(name), others.get(name))
            ]
            if differing:
                group, other = (
                    next(name for name in own["params"] if group_of[name] == at) for at in (sources[0], source)
                )
                difference = f"{group} and {other} were saved with different options ({', '.join(differing)})"
                raise TreeMismatchError(
                    f"{difference} but are now in one group; use the same groups as when the optimizer was saved",
                    [difference],
                )
        result.append(sources)
    return result


def _equal_options(first: Any, other: Any) -> bool:
    if isinstance(first, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(first, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and first.dtype == other.dtype and torch.equal(first, other)
    return bool(first == other)


def _format_option(options: Mapping[str, Any], name: str) -> str:
    option = options.get(name)
    if isinstance(option, torch.Tensor) and option.numel() == 1:
        option = option.item()
    return repr(option)[:80] if name in options else "nothing"
