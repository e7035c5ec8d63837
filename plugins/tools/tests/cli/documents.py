"""Validation of JSON documents by `TypedDict`."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict


def problems(value: object, expected: Any, where: str = "$") -> list[str]:
    """Return the places of a parsed JSON document that do not match a type. Unknown members do not match."""
    if is_typeddict(expected):
        return _problems_of_object(value, expected, where)
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in (Union, types.UnionType):
        if any(get_origin(choice) is Mapping for choice in arguments):
            return []  # the type `JSON`: no other union contains a mapping
        return [] if any(not problems(value, choice, where) for choice in arguments) else [f"{where}: {value!r}"]
    if origin is Literal:
        return [] if value in arguments else [f"{where}: {value!r} is not one of {arguments}"]
    if origin is list:
        if not isinstance(value, list):
            return [f"{where}: {value!r} is no list"]
        return [
            text for number, item in enumerate(value) for text in problems(item, arguments[0], f"{where}[{number}]")
        ]
    if origin is dict:
        if not isinstance(value, dict):
            return [f"{where}: {value!r} is no object"]
        return [text for key, item in value.items() for text in problems(item, arguments[1], f"{where}.{key}")]
    kinds = (int, float) if expected is float else (expected,)
    return [] if type(value) in kinds else [f"{where}: {value!r} is no {expected}"]


def _problems_of_object(value: object, expected: Any, where: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where}: {value!r} is no object"]
    hints = get_type_hints(expected, include_extras=True)
    texts = [f"{where}.{key}: is not documented" for key in value.keys() - hints.keys()]
    for key, hint in hints.items():
        optional = get_origin(hint) is NotRequired
        if key in value:
            texts += problems(value[key], get_args(hint)[0] if optional else hint, f"{where}.{key}")
        elif not optional:
            texts.append(f"{where}.{key}: is missing")
    return texts
