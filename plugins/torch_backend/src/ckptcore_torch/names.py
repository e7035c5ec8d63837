"""Names of parameters and buffers in the plain model, without the parts that wrappers add.

A wrapper holds the wrapped module in an attribute, and the name of this attribute is part of every
name inside the wrapper. Some wrappers remove this part from the keys of their state dict (torch
2.13.0, ``checkpoint_wrapper.py`` and ``fsdp/_state_dict_utils.py``), but not from
`named_parameters`. Wrappers are recognised by type, not by name, because a model can have a child
called ``module``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Final

import torch

from ckptcore.errors import NameCollisionError

_WRAPPERS: Final[tuple[tuple[str, str, str], ...]] = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", "_checkpoint_wrapped_module"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
)
"""Module, class and attribute of each wrapper. Only imported modules are checked."""

_PARTS: Final = frozenset(attribute for _, _, attribute in _WRAPPERS)


def plain_names(module: torch.nn.Module, names: Iterable[str]) -> Mapping[str, str]:
    """Return the plain name of each name of a parameter or state dict entry of `module`.

    Raises:
        NameCollisionError: if two names have the same plain name, because a wrapper has a parameter
            of its own.
    """
    wrappers = _wrappers_in(module)
    if not wrappers:
        return {name: name for name in names}
    plain_by_name: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in names:
        plain = _plain_name(module, name, wrappers)
        other = taken.setdefault(plain, name)
        if other != name:
            raise NameCollisionError(
                f"{other!r} and {name!r} of the {type(module).__qualname__} have the same name "
                f"{plain!r} without wrappers; rename one. Nothing was written"
            )
        plain_by_name[name] = plain
    return plain_by_name


def plain_module_names(module: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the names of modules inside `module` in the plain model, by their names in `module`."""
    wrappers = _wrappers_in(module)
    return {name: _plain_name(module, name, wrappers) if name else name for name in names}


def has_wrappers(module: torch.nn.Module) -> bool:
    """Return True if the module or a module inside it is a wrapper. Otherwise all names are plain."""
    return bool(_wrappers_in(module))


def wrapper_parts(name: str) -> tuple[tuple[str, ...], str]:
    """Return the parts of a name that may come from wrappers, and the name without them.

    Use it only to detect and report errors, because it does not check the types of the modules.
    """
    parts = name.split(".")
    of_wrappers = tuple([part for part in parts if part in _PARTS])
    return of_wrappers, ".".join([part for part in parts if part not in _PARTS])


def _wrappers_in(module: torch.nn.Module) -> Mapping[torch.nn.Module, str]:
    """Return the wrappers in a tree of modules, each with the name of the attribute that holds the wrapped module."""
    kinds = [
        (kind, attribute)
        for module_name, name, attribute in _WRAPPERS
        if (kind := getattr(sys.modules.get(module_name), name, None)) is not None
    ]
    classes = tuple([kind for kind, _ in kinds])
    return {
        inner: next(attribute for kind, attribute in kinds if isinstance(inner, kind))
        for inner in module.modules()
        if isinstance(inner, classes)
    }


def _plain_name(module: torch.nn.Module, name: str, wrappers: Mapping[torch.nn.Module, str]) -> str:
    kept: list[str] = []
    current: torch.nn.Module | None = module
    for part in name.split("."):
        # Skip wrappers that removed their part from the name. Do not skip a wrapper if the part is
        # the name of a child or parameter of the wrapper itself.
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
