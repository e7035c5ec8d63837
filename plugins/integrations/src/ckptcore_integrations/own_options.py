"""Errors of adapters: they name only options that the adapter has."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TypeVar

from ckptcore.errors import CheckpointError

_T = TypeVar("_T", bound=Callable[..., object])


def own_options(*options: str) -> Callable[[_T], _T]:
    """Decorate a function, or all methods of a class, with `CheckpointError.offering` of these options."""

    def decorate(target: _T) -> _T:
        if not isinstance(target, type):
            decorated: _T = CheckpointError.offering(*options)(target)
            return decorated
        for name, member in list(vars(target).items()):
            if isinstance(member, FunctionType):
                setattr(target, name, CheckpointError.offering(*options)(member))
        return target

    return decorate
