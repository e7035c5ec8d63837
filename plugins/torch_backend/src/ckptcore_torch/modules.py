"""Checkpointable handler of `torch.nn.Module`, and loaders of modules other than PyTorch's own."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from ckptcore.errors import TreeMismatchError
from ckptcore.handlers import state_to_load
from ckptcore.model import AbstractArray
from ckptcore.protocols import CheckpointableHandler, Priority
from ckptcore_torch.abstracts import abstract_tensor
from ckptcore_torch.conversions import encoding_of
from ckptcore_torch.copies import ModuleCopy
from ckptcore_torch.names import has_wrappers, plain_module_names, plain_names, wrapper_parts
from ckptcore_torch.sparse_tensors import resize_sparse_buffers
from ckptcore_torch.tensors import identity_of, is_sharded, is_uninitialized, overlaps_itself, same_memory

_WITHOUT_CHANGES: Final = ("torch.distributed.", "torch._dynamo.", "torch.nn.parallel.")
"""Packages of PyTorch with wrappers. Their hooks and loaders neither rename entries nor change the form of entries."""


@dataclass(frozen=True, slots=True)
class Loaders:
    """The parts of a module that customize how entries are loaded.

    Attributes:
        parts: names of parts that may accept other entries than those that they save, at any depth inside the part.
        of_own_entries: names of parts that may do so only for their own parameters and buffers.
        of_extra_state: names of parts that set an extra state.
        are_foreign: True if a loader is not PyTorch's. Such a loader may refuse any state.
    """

    parts: frozenset[str]
    of_own_entries: frozenset[str]
    of_extra_state: frozenset[str]
    are_foreign: bool

    @classmethod
    def of(cls, module: torch.nn.Module) -> Loaders:
        """Find the loaders in a module: hooks, overridden methods of parts, and an overridden `load_state_dict`."""
        parts, of_own_entries, of_extra_state = set[str](), set[str](), set[str]()
        are_foreign = False
        for name, part in module.named_modules(remove_duplicate=False):
            for loader, owner in _loaders(part, is_whole=part is module):
                if owner.startswith(_WITHOUT_CHANGES):
                    continue
                is_foreign = not owner.startswith("torch.")
                are_foreign = are_foreign or is_foreign
                if loader == "set_extra_state":
                    of_extra_state.add(name)
                elif loader == "_load_from_state_dict" and not is_foreign:
                    of_own_entries.add(name)
                else:
                    parts.add(name)
        return cls(frozenset(parts), frozenset(of_own_entries), frozenset(of_extra_state), are_foreign)

    @property
    def exist(self) -> bool:
        """True if the module has any loader."""
        return bool(self.parts or self.of_own_entries or self.of_extra_state)

    def with_plain_names(self, module: torch.nn.Module) -> Loaders:
        """Return the loaders with the names of the parts in the plain model."""

        def plain(names: frozenset[str]) -> frozenset[str]:
            return frozenset(plain_module_names(module, names).values())

        return Loaders(plain(self.parts), plain(self.of_own_entries), plain(self.of_extra_state), self.are_foreign)

    def decide(self, name: str) -> bool:
        """Return True if a loader decides which form an entry of the state dict has, and if the entry must exist."""
        owner, _, entry = name.rpartition(".")
        if owner in self.of_own_entries or (entry == "_extra_state" and owner in self.of_extra_state):
            return True
        while self.parts:
            if owner in self.parts:
                return True
            if not owner:
                return False
            owner = owner.rpartition(".")[0]
        return False


NO_LOADERS: Final = Loaders(frozenset(), frozenset(), frozenset(), are_foreign=False)
"""The value for a module without loaders of its own."""


def _loaders(part: torch.nn.Module, *, is_whole: bool) -> Iterator[tuple[str, str]]:
    """Yield the kind of each loader of a part, and the name of the Python module that defines it, with a final dot."""
    for name in ("_load_from_state_dict", "set_extra_state", *(("load_state_dict",) if is_whole else ())):
        method = getattr(type(part), name)
        if method is not getattr(torch.nn.Module, name):
            yield name, f"{method.__module__}."
    for hook in (*part._load_state_dict_pre_hooks.values(), *part._load_state_dict_post_hooks.values()):
        yield "hook", f"{_module_of(hook)}."


def _module_of(hook: Any) -> str:
    """Return the name of the Python module that defines a hook.

    Looks inside PyTorch's wrappers and partial functions.
    """
    while (inner := getattr(hook, "hook", None) or getattr(hook, "func", None)) is not None:
        hook = inner
    return str(getattr(hook, "__module__", None) or type(hook).__module__)


class ModuleHandler(CheckpointableHandler):
    """Handler of `torch.nn.Module`. Saves its state dict under the names of the plain model.

    The state dict contains tied weights under all their names, and persistent buffers. Plain names
    lack the parts that DistributedDataParallel, DataParallel, torch.compile, activation
    checkpointing and FSDP add. ``load(location, module)`` returns a state dict for the module's
    ``load_state_dict``; ``load_into`` fills the module.

    For a module with hooks, an extra state or its own loader, only its ``load_state_dict`` knows
    which entries it accepts. Entries of such modules are loaded in their stored form, with the
    module versions (``_metadata``) of the checkpoint.
    """

    priority = Priority.FRAMEWORK

    def flatten(self, value: torch.nn.Module) -> object:
        """Return the state dict under plain names. Its tensors share memory with the module.

        Raises:
            NameCollisionError: if two entries have the same plain name.
        """
        return _with_plain_names(value, value.state_dict())

    def flatten_to_load(self, value: torch.nn.Module, stored: object) -> object:
        """Return the request for the state dict. Entries whose form the module's loaders decide keep their stored form.

        If the stored names are equal to the names of the module's own state dict, the result uses
        them instead of plain names.

        Raises:
            TreeMismatchError: if the stored names differ from the module's only by wrappers, or if elements of an
                entry share memory, as in an expanded buffer.
        """
        state = value.state_dict()
        if not isinstance(stored, Mapping):
            return _with_plain_names(value, state)
        loaders = Loaders.of(value)
        if stored.keys() != state.keys():
            state = _with_plain_names(value, state)
            loaders = loaders.with_plain_names(value)
        _refuse_other_wrappers(value, state, stored, loaders)
        _refuse_overlaps(value, state, stored)
        if not loaders.parts and stored.keys().isdisjoint(state.keys()):
            loaders = NO_LOADERS  # no stored name belongs to a loader, so the core reports all differences
        return _to_load(state, stored, loaders)

    def unflatten(self, like: torch.nn.Module, state: Any) -> object:
        """Return the state dict with all names that ``like.load_state_dict`` expects, also of tied entries."""
        own = like.state_dict()
        return _with_all_names(own, _with_module_names(like, own, state))

    def restore(self, target: torch.nn.Module, state: Any) -> None:
        """Load the state into the module.

        Calls `load_state_dict`, unless all entries were filled in place and the module does not
        customize its loading. Parameters stay the same objects, except parameters on the meta
        device, which are replaced. Tied parameters and buffers on the meta device are replaced by
        one shared object.

        Raises:
            TreeMismatchError: if the state and the module have different names, and no loader of
                the module decides about these names.
        """
        own = target.state_dict()
        state = _with_all_names(own, _with_module_names(target, own, state))
        loaders = Loaders.of(target)
        differences = [
            *(f"{name} is missing" for name in own.keys() - state.keys() if not loaders.decide(name)),
            *(f"{name} is not in the module" for name in state.keys() - own.keys() if not loaders.decide(name)),
        ]
        if differences:
            raise TreeMismatchError(
                f"the loaded state does not fit the {type(target).__qualname__}: "
                f"{'; '.join(sorted(differences)[:20])}; create the module with the same "
                "architecture as when it was saved",
                sorted(differences),
            )
        lacking = [name for name, held in own.items() if _is_meta(held) and name in state]
        if lacking:
            ties = _ties_on_meta(target)
            assigned = OrderedDict((name, state[name]) for name in lacking)
            # Copy the metadata: with ``assign=True``, PyTorch writes a flag into it.
            assigned._metadata = copy.deepcopy(getattr(state, "_metadata", {}))  # type: ignore[attr-defined]
            target.load_state_dict(assigned, strict=False, assign=True)
            _restore_ties(target, ties, set(plain_names(target, lacking).values()))
            own = target.state_dict()
        in_place = own.keys() == state.keys() and all(same_memory(held, state[name]) for name, held in own.items())
        if not in_place or loaders.exist:
            resize_sparse_buffers(target, state)
            target.load_state_dict(state)

    def may_refuse(self, target: torch.nn.Module, request: Any) -> bool:
        """Return True if the module has loaders that are not PyTorch's, or if some entries are not filled in place."""
        own = target.state_dict()
        request = _with_all_names(own, _with_module_names(target, own, request))
        return Loaders.of(target).are_foreign or any(
            name not in request or not _is_filled(held, request[name]) for name, held in own.items()
        )

    def undo(self, target: torch.nn.Module) -> Callable[[], None]:
        """Return a function that restores the current parameters, buffers and extra states."""
        return ModuleCopy(target).restore


def _to_load(state: Any, stored: Mapping[Any, Any], loaders: Loaders) -> Any:
    """Return the request for a state dict: the module's tensors to fill.

    Entries that a loader decides about keep their stored form.
    """
    request: Any = OrderedDict()
    request._metadata = getattr(stored, "_metadata", None) or getattr(state, "_metadata", {})
    stored_ties = {identity: name for name, identity in _identities(state).items() if name in stored}
    for name, held in state.items():
        if name not in stored and identity_of(held) in stored_ties:
            continue  # filled under another of its names
        if is_uninitialized(held) and isinstance(stored.get(name), AbstractArray):
            request[name] = abstract_tensor(stored[name])
        elif not loaders.decide(name):
            request[name] = held
        elif name in stored:
            has_form = _has_form(held, stored[name], any_dtype=not loaders.are_foreign)
            request[name] = held if has_form else _stored_form(held, stored[name])
    for name, item in stored.items():
        if name not in state and isinstance(name, str) and loaders.decide(name):
            request[name] = state_to_load(None, item, array=abstract_tensor)
    return request


def _identities(state: Mapping[str, Any]) -> dict[str, Hashable]:
    """Return the identity of each tensor of a state dict. Tied tensors have equal identities."""
    identities = {name: identity_of(held) for name, held in state.items()}
    return {name: identity for name, identity in identities.items() if identity is not None}


def _with_all_names(own: Mapping[str, Any], state: Any) -> Any:
    """Add tied entries that are stored only under another name.

    For example, transformers saves each tied weight once.
    """
    if own.keys() <= state.keys():
        return state
    identities = _identities(own)
    names = {identity: name for name, identity in identities.items() if name in state}
    added = {name: names[identity] for name, identity in identities.items() if name not in state and identity in names}
    if not added:
        return state
    result = copy.copy(state)  # keeps the versions of modules
    result.update({name: state[source] for name, source in added.items()})
    return result


def _refuse_overlaps(module: torch.nn.Module, state: Mapping[str, Any], stored: Mapping[Any, Any]) -> None:
    for name, held in state.items():
        if type(held) in (torch.Tensor, torch.nn.Parameter) and name in stored and overlaps_itself(held):
            difference = f"{name} of the {type(module).__qualname__} has elements that share memory"
            raise TreeMismatchError(
                f"{difference}, as after expand(), so no state can be loaded into it. Register it as a copy: "
                f"register_buffer(name, tensor.contiguous())",
                [difference],
            )


def _is_filled(held: object, requested: object) -> bool:
    """Return True if a load fills an entry of a module in place, or assigns a value to an entry without elements."""
    if not isinstance(held, torch.Tensor) or is_uninitialized(held) or is_sharded(type(held)) or held.is_meta:
        return True
    return isinstance(requested, torch.Tensor) and not requested.is_meta


def _stored_form(held: object, stored: Any) -> object:
    """Return the request for an entry whose stored form differs from the form in the module."""
    if isinstance(held, torch.Tensor) and isinstance(stored, AbstractArray):
        return abstract_tensor(stored)
    return state_to_load(held, stored, array=abstract_tensor)


def _has_form(held: object, stored: object, *, any_dtype: bool) -> bool:
    """Return True if a tensor of the module has the stored shape and dtype, so that it can be filled.

    A different dtype matters only if a loader is not PyTorch's, because it may need the stored
    dtype. Otherwise the core reports the difference.
    """
    return (
        isinstance(held, torch.Tensor)
        and isinstance(stored, AbstractArray)
        and tuple(held.shape) == stored.shape
        and (any_dtype or encoding_of(held.dtype).name == stored.dtype.name)
    )


def _with_plain_names(module: torch.nn.Module, state: Any) -> Any:
    """Rename the entries of a module's state dict, and their versions, to plain names."""
    if not has_wrappers(module):
        return state
    parts = getattr(state, "_metadata", {})
    return _rename(state, plain_names(module, state), plain_module_names(module, parts))


def _with_module_names(module: torch.nn.Module, own: Any, state: Any) -> Any:
    """Rename plain names in a state dict to the names in the module's state dict `own`. Keep unknown names."""
    if state.keys() == own.keys() or not has_wrappers(module):
        return state
    own_name = {plain: name for name, plain in plain_names(module, own).items()}
    parts = plain_module_names(module, [name for name, _ in module.named_modules()])
    own_part = {plain: name for name, plain in parts.items()}
    return _rename(state, {name: own_name.get(name, name) for name in state}, own_part)


def _rename(state: Any, names: Mapping[str, str], parts: Mapping[str, str]) -> Any:
    """Rename the entries of a state dict, and the parts in its versions. Keep their order."""
    renamed = OrderedDict((names[name], held) for name, held in state.items())
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        renamed._metadata = {parts.get(part, part): version for part, version in versions.items()}  # type: ignore[attr-defined]  # PyTorch sets this attribute, too
    return renamed


def _refuse_other_wrappers(
    module: torch.nn.Module, state: Mapping[str, Any], stored: Mapping[Any, Any], loaders: Loaders
) -> None:
    """Raise an error if the stored names differ from the names of a module only by the parts of wrappers.

    If all names differ by the same prefix, raise nothing: the core then suggests the transform that
    removes or adds the prefix.
    """
    if stored.keys() == state.keys() or not all(isinstance(name, str) for name in stored):
        return
    stored_names, own_names = ({wrapper_parts(name)[1]: name for name in names} for names in (stored, state))
    if stored_names.keys() != own_names.keys():
        return
    if not loaders.parts and len({_prefixes(stored_names[plain], own_names[plain]) for plain in own_names}) == 1:
        return
    plain = next(name for name in stored_names if stored_names[name] != own_names[name])
    stored_name, expected = stored_names[plain], own_names[plain]
    parts = list(wrapper_parts(stored_name)[0])
    for part in wrapper_parts(expected)[0]:
        if part in parts:
            parts.remove(part)
    prefix = ".".join(parts) + "." if parts else ""
    reason = f"with {prefix!r} of a wrapper" if prefix else f"without the {wrapper_parts(expected)[0][0]!r} in it"
    difference = f"{expected!r} is stored as {stored_name!r}, {reason}"
    raise TreeMismatchError(
        f"the stored names do not fit the {type(module).__qualname__}: {difference}. The "
        "checkpoint contains a state dict of a module in other wrappers, saved as a plain dict. "
        "Use the same wrappers, or load the tensors under their stored names: "
        "load_into(location, {stored name: tensor of module.state_dict()})",
        [difference],
    )


def _prefixes(first: str, other: str) -> tuple[str, ...]:
    """Return the parts of two names before the parts that are equal at the end."""
    parts, others = first.split("."), other.split(".")
    while parts and others and parts[-1] == others[-1]:
        parts.pop()
        others.pop()
    return ".".join(parts), ".".join(others)


def _is_meta(held: object) -> bool:
    return isinstance(held, torch.Tensor) and not is_uninitialized(held) and not is_sharded(type(held)) and held.is_meta


def _ties_on_meta(module: torch.nn.Module) -> list[list[str]]:
    """Return the names of each tied Parameter or buffer on the meta device."""
    names: dict[int, list[str]] = {}
    for named in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            if tensor.is_meta:
                names.setdefault(id(tensor), []).append(name)
    return [tied for tied in names.values() if len(tied) > 1]


def _restore_ties(module: torch.nn.Module, ties: list[list[str]], loaded: set[str]) -> None:
    """Assign the loaded tensor to every name of a tied tensor. Skip ties without a loaded tensor.

    Args:
        module: the module.
        ties: names of each tied tensor, from `named_parameters`.
        loaded: plain names of the loaded tensors.
    """
    for names in ties:
        source = next((name for name, plain in plain_names(module, names).items() if plain in loaded), None)
        if source is None:
            continue
        owner, _, attribute = source.rpartition(".")
        tensor = getattr(module.get_submodule(owner), attribute)
        for other in names:
            owner, _, attribute = other.rpartition(".")
            setattr(module.get_submodule(owner), attribute, tensor)
