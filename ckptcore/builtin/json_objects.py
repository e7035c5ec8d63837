"""JSON objects in files that other software wrote; every byte of them is hostile until checked."""

from __future__ import annotations

import json
from typing import Any, Final, Literal, TypeAlias

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model.tree import JSON
from ckptcore.protocols import ReadStore

__all__ = ["Constants", "parse_json_object", "read_json_object"]

_MOST_BYTES: Final = 1 << 24
_MOST_DEPTH: Final = 64


Constants: TypeAlias = Literal["refused", "kept"]
"""What is done with ``NaN`` and ``Infinity``, which are no JSON. Python writes them, so that configurations of models have them."""


def read_json_object(store: ReadStore, key: str, *, constants: Constants = "refused") -> dict[str, JSON]:
    """A JSON object that stands in a file beside tensors; no deeper and larger than metadata can be.

    Raises:
        ObjectNotFoundError: if there is no such file.
        CorruptCheckpointError: if it holds anything else.
    """
    nbytes = store.size(key)
    if nbytes > _MOST_BYTES:
        raise CorruptCheckpointError(
            f"{key} has {nbytes} bytes, where at most {_MOST_BYTES} are expected; name a file of tensors to load it alone",
            key=key,
        )
    config: dict[str, JSON] = parse_json_object(store.get(key), key, constants=constants)
    inside: list[JSON] = [config]
    for _ in range(_MOST_DEPTH):
        inside = [
            child
            for value in inside
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
        ]
        if not inside:
            return config
    raise CorruptCheckpointError(f"the JSON in {key} is nested deeper than {_MOST_DEPTH} levels", key=key)


def parse_json_object(data: bytes, key: str, *, constants: Constants = "refused") -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
        CorruptCheckpointError: if it holds anything else, or one key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("it has one key twice")
        return made

    def constant_of(constant: str) -> object:
        if constants == "kept":
            return float(constant)
        raise ValueError(f"it has {constant}, which is no JSON")

    try:
        parsed = json.loads(data, object_pairs_hook=unique, parse_constant=constant_of)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"the JSON in {key} cannot be read: {error}", key=key) from error
    if not isinstance(parsed, dict):
        raise CorruptCheckpointError(f"the JSON in {key} is not an object", key=key)
    return parsed
