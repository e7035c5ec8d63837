"""Names of LoRA parameters: what they are called in a model, and in a file of PEFT.

In a model that PEFT made, the name of the adapter stands in the name of each parameter, so that there can be several:
``base_model.model.q_proj.lora_A.default.weight``. In a file it does not: ``base_model.model.q_proj.lora_A.weight`` (peft 0.21.2,
``get_peft_model_state_dict``). Other programs have no adapter names, no prefix, or hold the matrix itself as ``lora_A``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from ckptcore.errors import NameCollisionError, TreeMismatchError

__all__ = ["PREFIX", "AdapterNames", "Biases", "LoraName", "check_stored_name", "names_of_adapter", "plain_name"]

PREFIX: Final = "base_model.model."
"""How the names in a file of PEFT begin."""

Biases: TypeAlias = Literal["none", "all", "lora_only"]
"""Which biases of the base model belong to an adapter: what ``bias`` says in the config of PEFT."""

_WRAPPERS: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""What torch.compile, FSDP and activation checkpointing put into names."""

_LINEAR: Final = frozenset({"lora_A", "lora_B"})
"""Modules: what is in them is a ``weight``, or a ``bias``."""
_ALONE: Final = frozenset({"lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "trainable_tokens_delta"})
"""Arrays: in a file nothing stands behind these names, also where the model has a ``weight`` in them."""
_COPIES: Final = "modules_to_save"
_PARAMETERS: Final = frozenset({"weight", "bias"})


@dataclass(frozen=True, slots=True)
class LoraName:
    """The name of a parameter of an adapter.

    Attributes:
        stored: in a file.
        adapter: of which adapter it is; None where the name does not say.
        is_bare: whether the model has the matrix itself under ``lora_A`` or ``lora_B``.
    """

    stored: str
    adapter: str | None
    is_bare: bool = False

    @classmethod
    def of(cls, name: str) -> LoraName | None:
        """What the name of a parameter of a model says; None for a parameter of the base model."""
        segments = _segments(name)
        for number, segment in enumerate(segments):
            before, rest = segments[: number + 1], segments[number + 1 :]
            if segment in _LINEAR:
                adapter, rest = _adapter(rest)
                return cls(_joined(before + (rest or ["weight"])), adapter, is_bare=not rest)
            if segment in _ALONE:
                adapter, rest = _adapter(rest)
                return cls(_joined(before + ([] if rest == ["weight"] else rest)), adapter)
            if segment == _COPIES and len(rest) > 1:
                return cls(_joined(before[:-1] + rest[1:]), rest[0])
        return None


@dataclass(frozen=True, slots=True)
class AdapterNames:
    """The names of what belongs to an adapter.

    Attributes:
        by_stored: by the name in a file, the name in the model.
        bare: the names in files of what the model has as matrices without a module around them.
    """

    by_stored: Mapping[str, str]
    bare: frozenset[str]


def names_of_adapter(names: Iterable[str], adapter_name: str, biases: Biases = "none") -> AdapterNames:
    """Choose what belongs to an adapter among the names of all parameters of a model.

    What is of no adapter by its name is of each.

    Raises:
        TreeMismatchError: if nothing does.
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
            _add(by_stored, found.stored, name)
            if found.is_bare:
                bare.add(found.stored)
    if not by_stored:
        there = f"; there are the adapters {', '.join(others)}" if others else ""
        raise TreeMismatchError(
            f"the model has no parameters of the adapter {adapter_name!r}: no name has lora_A, lora_B, lora_embedding_A, "
            f"lora_magnitude_vector, trainable_tokens_delta or modules_to_save with it{there}; give adapter_name=, or the model "
            "that the adapter is in",
            [f"no parameters of {adapter_name!r}"],
        )
    if biases != "none":
        adapted = {stored.rpartition(".lora_")[0] for stored in by_stored if ".lora_" in stored}
        for name in base:
            stored = plain_name(name)
            layer = stored.removesuffix(".bias").removesuffix(".base_layer")
            if stored.endswith(".bias") and (biases == "all" or layer in adapted):
                _add(by_stored, stored, name)
    return AdapterNames(by_stored, frozenset(bare))


def plain_name(name: str) -> str:
    """What PEFT calls a parameter of the base model in a file: without what wraps modules, behind its prefix."""
    return _joined(_segments(name))


def check_stored_name(name: str) -> None:
    """Do nothing if PEFT would find a parameter of LoRA under this name.

    Raises:
        TreeMismatchError
    """
    expected = name if name.startswith(PREFIX) else PREFIX + name
    found = LoraName.of(name)
    if found is not None:
        expected = found.stored
    if name != expected:
        raise TreeMismatchError(
            f"{name[:200]!r} is no name that PEFT looks for; expected {expected[:200]!r}: pass the model, what adapter_state gives "
            "for it, or arrays under the names that PEFT writes",
            [f"{name}: expected {expected}"],
        )


def _segments(name: str) -> list[str]:
    """The parts of a name in the order of modules, without wrappers and PEFT's prefix."""
    segments = [segment for segment in name.split(".") if segment not in _WRAPPERS]
    return segments[2:] if segments[:2] == ["base_model", "model"] and len(segments) > 2 else segments


def _joined(segments: Iterable[str]) -> str:
    return PREFIX + ".".join(segments)


def _adapter(rest: list[str]) -> tuple[str | None, list[str]]:
    """What stands behind the name of a LoRA module: the name of an adapter, where there is one, and what it has."""
    if not rest or (len(rest) == 1 and rest[0] in _PARAMETERS):
        return None, rest
    return rest[0], rest[1:]


def _add(by_stored: dict[str, str], stored: str, name: str) -> None:
    if stored in by_stored:
        raise NameCollisionError(
            f"{by_stored[stored]!r} and {name!r} would both be stored as {stored!r}; PEFT tells them apart by nothing either: "
            "rename a module of the model"
        )
    by_stored[stored] = name
