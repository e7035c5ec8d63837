"""Names of parameters and buffers as the plain model has them, without what wrappers around modules put before them.

A wrapper holds the module that it wraps under one attribute, which becomes part of every name below it. Some take it out of the keys
of their state dict again (torch 2.13.0, ``checkpoint_wrapper.py`` and ``fsdp/_state_dict_utils.py``), and none out of
`named_parameters`. What counts as a wrapper is the type of a module, never the text of a name: a model may have a child called
``module`` of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Final

import torch

from ckptcore.errors import NameCollisionError

__all__ = ["has_wrappers", "plain_names", "wrapper_parts"]

_WRAPPERS: Final[tuple[tuple[str, str, str], ...]] = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", "_checkpoint_wrapped_module"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
)
"""Module, class and attribute of each wrapper. Looked up among what is imported: who did not import one has none."""

_PARTS: Final = frozenset(attribute for _, _, attribute in _WRAPPERS)


def plain_names(module: torch.nn.Module, names: Iterable[str]) -> Mapping[str, str]:
    """For each name, as `module` gives it in its state dict or for a parameter, the name in the plain model.

    Raises:
        NameCollisionError: if two would have one name: a wrapper with a parameter of its own.
    """
    wrappers = _wrappers_in(module)
    if not wrappers:
        return {name: name for name in names}
    found: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in names:
        plain = _plain_name(module, name, wrappers)
        other = taken.setdefault(plain, name)
        if other != name:
            raise NameCollisionError(
                f"{other!r} and {name!r} of the {type(module).__qualname__} are both {plain!r} without the wrappers around "
                "modules; rename one. Nothing was written"
            )
        found[name] = plain
    return found


def has_wrappers(module: torch.nn.Module) -> bool:
    """Whether a module, or one in it, is a wrapper; where not, every name is a plain one."""
    return bool(_wrappers_in(module))


def wrapper_parts(name: str) -> tuple[tuple[str, ...], str]:
    """The parts of a name that may come from wrappers, and the name without them. To explain; not to decide by."""
    parts = name.split(".")
    of_wrappers = tuple([part for part in parts if part in _PARTS])
    return of_wrappers, ".".join([part for part in parts if part not in _PARTS])


def _wrappers_in(module: torch.nn.Module) -> Mapping[torch.nn.Module, str]:
    """The wrappers in a tree of modules, each with the attribute that holds what it wraps."""
    kinds = [
        (kind, attribute)
        for place, name, attribute in _WRAPPERS
        if (kind := getattr(sys.modules.get(place), name, None)) is not None
    ]
    classes = tuple([kind for kind, _ in kinds])
    return {
        part: next(attribute for kind, attribute in kinds if isinstance(part, kind))
        for part in module.modules()
        if isinstance(part, classes)
    }


def _plain_name(module: torch.nn.Module, name: str, wrappers: Mapping[torch.nn.Module, str]) -> str:
    kept: list[str] = []
    current: torch.nn.Module | None = module
    for part in name.split("."):
        # A wrapper that took its part out of the name is passed over, unless what is named is its own.
        while current is not None and (attribute := wrappers.get(current)) is not None:
            if part == attribute or _has(current, part):
                break
            current = current._modules.get(attribute)
        if current is not None and wrappers.get(current) == part:
            current = current._modules[part]
            continue
        kept.append(part)
        current = None if current is None else current._modules.get(part)
    return ".".join(kept)


def _has(module: torch.nn.Module, part: str) -> bool:
    if part == "_extra_state":
        return type(module).get_extra_state is not torch.nn.Module.get_extra_state
    return part in module._modules or part in module._parameters or part in module._buffers
