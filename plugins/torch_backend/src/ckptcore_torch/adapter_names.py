"""Names of LoRA parameters in a model and in a file of PEFT, and the JSON of ``adapter_config.json``.

A model of PEFT can have several adapters, so each parameter name contains the name of its adapter:
``base_model.model.q_proj.lora_A.default.weight``. Names in a file do not:
``base_model.model.q_proj.lora_A.weight`` (peft 0.21.2, ``get_peft_model_state_dict``). In models of
other programs, names can lack the adapter name or the prefix, and ``lora_A`` can be the matrix
itself instead of a module.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias, runtime_checkable

from ckptcore.errors import CorruptCheckpointError, NameCollisionError, TreeMismatchError
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
    """Convert a config to JSON. As in PEFT, sets become sorted lists, and enumeration members become their values.

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
        ValueError: if PEFT does not have the method, and therefore cannot load the adapter.
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


PREFIX: Final = "base_model.model."
"""Prefix of the names in a file of PEFT."""

Biases: TypeAlias = Literal["none", "all", "lora_only"]
"""Biases of the base model that belong to an adapter: ``bias`` in the config of PEFT."""

_WRAPPERS: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Name parts added by torch.compile, FSDP and activation checkpointing."""

_LINEAR: Final = frozenset({"lora_A", "lora_B"})
"""Modules that contain a ``weight`` or a ``bias``."""
_ALONE: Final = frozenset({"lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "trainable_tokens_delta"})
"""Arrays whose names in a file have no suffix, even if the model has a ``weight`` below them."""
_COPIES: Final = "modules_to_save"
_PARAMETERS: Final = frozenset({"weight", "bias"})


@dataclass(frozen=True, slots=True)
class LoraName:
    """Name of an adapter's parameter.

    Attributes:
        stored: name in a file.
        adapter: name of the adapter; None if the parameter name lacks it.
        is_bare: True if ``lora_A`` or ``lora_B`` is the matrix itself, not a module.
    """

    stored: str
    adapter: str | None
    is_bare: bool = False

    @classmethod
    def of(cls, name: str) -> LoraName | None:
        """Parse the name of a parameter in a model. Return None for a parameter of the base model."""
        segments = _split_name(name)
        for number, segment in enumerate(segments):
            before, rest = segments[: number + 1], segments[number + 1 :]
            if segment in _LINEAR:
                adapter, rest = _split_adapter(rest)
                return cls(_join_name(before + (rest or ["weight"])), adapter, is_bare=not rest)
            if segment in _ALONE:
                adapter, rest = _split_adapter(rest)
                return cls(_join_name(before + ([] if rest == ["weight"] else rest)), adapter)
            if segment == _COPIES and len(rest) > 1:
                return cls(_join_name(before[:-1] + rest[1:]), rest[0])
        return None


@dataclass(frozen=True, slots=True)
class AdapterNames:
    """Names of the parameters of an adapter.

    Attributes:
        by_stored: name in the model, by name in a file.
        bare: file names of matrices that have no module around them in the model.
    """

    by_stored: Mapping[str, str]
    bare: frozenset[str]


def names_of_adapter(names: Iterable[str], adapter_name: str, biases: Biases = "none") -> AdapterNames:
    """Select the parameters of an adapter among the names of all parameters of a model.

    Names without an adapter name belong to every adapter.

    Raises:
        TreeMismatchError: if the adapter has no parameters.
        NameCollisionError: if two parameters would get the same name.
    """
    by_stored: dict[str, str] = {}
    bare: set[str] = set()
    others: dict[str, None] = {}
    base: list[str] = []
    for name in names:
        lora = LoraName.of(name)
        if lora is None:
            base.append(name)
        elif lora.adapter not in (None, adapter_name):
            others[str(lora.adapter)] = None
        else:
            _add_name(by_stored, lora.stored, name)
            if lora.is_bare:
                bare.add(lora.stored)
    if not by_stored:
        known = f"; the model has the adapters {', '.join(others)}" if others else ""
        raise TreeMismatchError(
            f"the model has no parameters of the adapter {adapter_name!r}: no name contains it "
            "with lora_A, lora_B, lora_embedding_A, lora_magnitude_vector, "
            f"trainable_tokens_delta or modules_to_save{known}; set adapter_name=, or pass the "
            "model that has the adapter",
            [f"no parameters of {adapter_name!r}"],
        )
    if biases != "none":
        adapted = {stored.rpartition(".lora_")[0] for stored in by_stored if ".lora_" in stored}
        for name in base:
            stored = plain_name(name)
            layer = stored.removesuffix(".bias").removesuffix(".base_layer")
            if stored.endswith(".bias") and (biases == "all" or layer in adapted):
                _add_name(by_stored, stored, name)
    return AdapterNames(by_stored, frozenset(bare))


def without_wrappers(name: str) -> str:
    """Remove the parts of a name that torch.compile, FSDP and activation checkpointing add."""
    return ".".join([segment for segment in name.split(".") if segment not in _WRAPPERS])


def plain_name(name: str) -> str:
    """Return the name of a base model parameter in a PEFT file: without wrappers, with PEFT's prefix."""
    return _join_name(_split_name(name))


def check_stored_name(name: str) -> None:
    """Check that PEFT would find a LoRA parameter under this name.

    Raises:
        TreeMismatchError: if PEFT uses another name.
    """
    expected = name if name.startswith(PREFIX) else PREFIX + name
    lora = LoraName.of(name)
    if lora is not None:
        expected = lora.stored
    if name != expected:
        raise TreeMismatchError(
            f"PEFT does not use the name {name[:200]!r}; expected {expected[:200]!r}: pass the model, "
            "the result of adapter_state, or arrays by the names that PEFT writes",
            [f"{name}: expected {expected}"],
        )


def _split_name(name: str) -> list[str]:
    """Split a name into parts, without wrappers and PEFT's prefix."""
    segments = without_wrappers(name).split(".")
    return segments[2:] if segments[:2] == ["base_model", "model"] and len(segments) > 2 else segments


def _join_name(segments: Iterable[str]) -> str:
    return PREFIX + ".".join(segments)


def _split_adapter(rest: list[str]) -> tuple[str | None, list[str]]:
    """Split the parts after a LoRA module into the adapter's name, if there is one, and the rest."""
    if not rest or (len(rest) == 1 and rest[0] in _PARAMETERS):
        return None, rest
    return rest[0], rest[1:]


def _add_name(by_stored: dict[str, str], stored: str, name: str) -> None:
    if stored in by_stored:
        raise NameCollisionError(
            f"{by_stored[stored]!r} and {name!r} would both be stored as {stored!r}, also by "
            "PEFT: rename a module of the model"
        )
    by_stored[stored] = name
