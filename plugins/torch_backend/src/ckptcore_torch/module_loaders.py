"""The loaders of modules, other than PyTorch's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from ckptcore_torch.names import plain_module_names

_WITHOUT_CHANGES: Final = ("torch.distributed.", "torch._dynamo.", "torch.nn.parallel.")
"""Modules of PyTorch whose hooks and loaders neither rename entries nor change their form: wrappers."""


@dataclass(frozen=True, slots=True)
class Loaders:
    """The parts of a module that load entries in a way of their own.

    Attributes:
        parts: the names of parts that may accept other entries than they save, at any depth inside them.
        of_own_entries: the names of parts of which this is true for their own parameters and buffers only.
        of_extra_state: the names of parts that set an extra state.
        are_foreign: True if a loader is not PyTorch's, so that it may refuse any state.
    """

    parts: frozenset[str]
    of_own_entries: frozenset[str]
    of_extra_state: frozenset[str]
    are_foreign: bool

    @classmethod
    def of(cls, module: torch.nn.Module) -> Loaders:
        """Find the loaders in a module: hooks, overridden methods, and an overridden `load_state_dict` of the whole."""
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
        """True if there are any."""
        return bool(self.parts or self.of_own_entries or self.of_extra_state)

    def with_plain_names(self, module: torch.nn.Module) -> Loaders:
        """Return the loaders with the names of the parts in the plain model."""

        def plain(names: frozenset[str]) -> frozenset[str]:
            return frozenset(plain_module_names(module, names).values())

        return Loaders(plain(self.parts), plain(self.of_own_entries), plain(self.of_extra_state), self.are_foreign)

    def decide(self, name: str) -> bool:
        """Return True if a loader decides about an entry of the state dict: which form it has, and if it must exist."""
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
"""The loaders of a module that PyTorch loads."""


def _loaders(part: torch.nn.Module, *, is_whole: bool) -> Iterator[tuple[str, str]]:
    """Yield the kind of each loader of a part, and the Python module that defines it, with a dot at the end."""
    for name in ("_load_from_state_dict", "set_extra_state", *(("load_state_dict",) if is_whole else ())):
        method = getattr(type(part), name)
        if method is not getattr(torch.nn.Module, name):
            yield name, f"{method.__module__}."
    for hook in (*part._load_state_dict_pre_hooks.values(), *part._load_state_dict_post_hooks.values()):
        yield "hook", f"{_module_of(hook)}."


def _module_of(hook: Any) -> str:
    """Return the Python module of a hook, which PyTorch may wrap to pass the module, and which may be partial."""
    while (inner := getattr(hook, "hook", None) or getattr(hook, "func", None)) is not None:
        hook = inner
    return str(getattr(hook, "__module__", None) or type(hook).__module__)
