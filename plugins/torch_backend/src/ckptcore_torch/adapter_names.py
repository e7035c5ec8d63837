"""Names of LoRA parameters in a model and in a file of PEFT.

A model of PEFT can have several adapters, so each parameter name contains the name of its adapter:
``base_model.model.q_proj.lora_A.default.weight``. Names in a file do not:
``base_model.model.q_proj.lora_A.weight`` (peft 0.21.2, ``get_peft_model_state_dict``). In models of
other programs, names can lack the adapter name or the prefix, and ``lora_A`` can be the matrix
itself instead of a module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from ckptcore.errors import NameCollisionError, TreeMismatchError

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
        NameCollisionError: if two parameters would get one name.
    """
    by_stored: dict[str, str] = {}
    bare: set[str] = set()
    others: dict[str, None] = {}
    base: list[str] = []
    for name in names:
        found = LoraName.of(name)
        if found is None:
            base.append(name)
        elif found.adapter not in (None, adapter_name):
            others[str(found.adapter)] = None
        else:
            _add_name(by_stored, found.stored, name)
            if found.is_bare:
                bare.add(found.stored)
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
    found = LoraName.of(name)
    if found is not None:
        expected = found.stored
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
