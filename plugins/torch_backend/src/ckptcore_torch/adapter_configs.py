"""Adapter configs: the JSON of ``adapter_config.json``, from which PEFT builds the modules of an adapter."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Final, Protocol, TypeAlias, runtime_checkable

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import JSON
from ckptcore.model.adapters import ADAPTER_METHODS

AdapterConfig: TypeAlias = Mapping[str, JSON]
"""Fields of ``adapter_config.json``."""

_LORA: Final = "LORA"
_MAX_DEPTH: Final = 64


@runtime_checkable
class SupportsToDict(Protocol):
    """A config of PEFT."""

    def to_dict(self) -> dict[str, object]:
        """Return its fields."""
        ...


def config_json(config: object) -> dict[str, JSON]:
    """Convert a config to JSON. As in PEFT, sets become sorted lists and enumerations their values.

    Args:
        config: a mapping, or a config of PEFT.

    Raises:
        ValueError, TypeError: for an invalid config.
    """
    fields = config.to_dict() if isinstance(config, SupportsToDict) else config
    if not isinstance(fields, Mapping):
        raise TypeError(
            f"config={str(config)[:200]!r}: expected a config of PEFT, or a mapping with the "
            "fields of adapter_config.json"
        )
    plain = {name: _to_json(value, f"config[{name!r}]", 0) for name, value in fields.items()}
    if problem := _problem(plain):
        raise ValueError(f"config: {problem}; PEFT rejects such a config. Nothing was written")
    try:
        json.dumps(plain, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"config has text that is not valid Unicode: {error}. Nothing was written") from error
    return plain


def check_method(config: Mapping[str, JSON]) -> None:
    """Check that PEFT has the method of a config.

    Raises:
        ValueError: it does not, so PEFT could not load the adapter.
    """
    method = config["peft_type"]
    if method not in ADAPTER_METHODS:
        raise ValueError(
            f"config: peft_type is {str(method)[:80]!r}, which is none of the {len(ADAPTER_METHODS)} methods of peft "
            "0.21.2, such as 'LORA' or 'IA3': correct it, or pass the model of a PEFT that has it, which names its "
            "parameters. Nothing was written"
        )


def is_lora(config: Mapping[str, JSON]) -> bool:
    """Return True for a config of LoRA."""
    return config["peft_type"] == _LORA


def stored_config(stored: JSON, location: object) -> dict[str, JSON]:
    """Validate a stored config.

    Raises:
        CorruptCheckpointError: if it is invalid.
    """
    if not isinstance(stored, dict) or (problem := _problem(stored)):
        what = "it is not a JSON object" if not isinstance(stored, dict) else problem
        raise CorruptCheckpointError(
            f"{location}: adapter_config.json is not a config of PEFT: {what}; repair it, or "
            "load only the arrays with ckptcore.load",
            key="adapter_config.json",
        )
    return dict(stored)


def _to_json(value: object, where: str, depth: int) -> JSON:
    if depth > _MAX_DEPTH:
        raise ValueError(f"{where[:200]} is nested deeper than {_MAX_DEPTH} levels. Nothing was written")
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}, which JSON cannot represent. Nothing was written")
        return value
    if isinstance(value, Mapping):
        if problem := [key for key in value if not isinstance(key, str | int) or isinstance(key, bool)]:
            raise TypeError(f"{where} has the key {problem[0]!r}; JSON keys must be strings. Nothing was written")
        return {str(key): _to_json(child, f"{where}[{key!r}]", depth + 1) for key, child in value.items()}
    if isinstance(value, AbstractSet):
        plain = [_to_json(child, where, depth + 1) for child in value]
        return sorted(plain, key=str)
    if isinstance(value, list | tuple):
        return [_to_json(child, f"{where}[{number}]", depth + 1) for number, child in enumerate(value)]
    raise TypeError(f"{where} is a {type(value).__qualname__}, which JSON cannot represent. Nothing was written")


def _problem(config: Mapping[str, JSON]) -> str | None:
    """Return the first problem of a config, or None. Checks only the fields of LoRA."""
    kind = config.get("peft_type")
    if not isinstance(kind, str):
        return f"peft_type is {str(kind)[:80]!r}; expected the name of a method, such as 'LORA'"
    if kind != _LORA:
        return None
    rank = config.get("r", 8)
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        return f"r is {str(rank)[:80]!r}; expected a positive integer"
    alpha = config.get("lora_alpha", 8)
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        return f"lora_alpha is {str(alpha)[:80]!r}; expected a number"
    if config.get("bias", "none") not in ("none", "all", "lora_only"):
        return f"bias is {str(config['bias'])[:80]!r}; expected 'none', 'all' or 'lora_only'"
    for name in ("target_modules", "modules_to_save", "target_parameters"):
        value = config.get(name)
        listed = isinstance(value, list) and all(isinstance(child, str) for child in value)
        if not (value is None or listed or (isinstance(value, str) and name == "target_modules")):
            return f"{name} is {str(value)[:80]!r}; expected a list of strings"
    return None
