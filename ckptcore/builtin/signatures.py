"""Whether a type has a method that can be called in a certain way."""

from __future__ import annotations

import inspect
from typing import Final

__all__ = ["required_names", "takes_only"]

_BY_POSITION: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def required_names(value_type: type, name: str) -> tuple[str, ...] | None:
    """The parameters that a method must be given, without ``self``; None if there is no such method of instances.

    Raises:
        ValueError: if the method is not written in Python and does not tell.
    """
    method = getattr(value_type, name, None)
    if method is None or not callable(method):
        return None
    if isinstance(inspect.getattr_static(value_type, name, None), staticmethod | classmethod):
        return None
    parameters = list(inspect.signature(method).parameters.values())
    if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
        return None  # not even ``self``
    if parameters[0].kind in _BY_POSITION:
        parameters = parameters[1:]
    required = [
        parameter
        for parameter in parameters
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    if any(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in required):
        return None
    return tuple([parameter.name for parameter in required])


def takes_only(value_type: type, name: str, count: int) -> bool:
    """Whether a method can be called with `count` arguments by position; one that does not tell is believed to."""
    method = getattr(value_type, name, None)
    if method is None or not callable(method):
        return False
    if isinstance(inspect.getattr_static(value_type, name, None), staticmethod | classmethod):
        return False
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return True  # not written in Python
    try:
        signature.bind(*[None] * (count + 1))
    except TypeError:
        return False
    return True
