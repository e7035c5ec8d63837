"""Parameters that the config of an adapter needs, for each method of PEFT."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from ckptcore.model.tree import JSON
from ckptcore.records import NamedTuple

_PROMPTS: Final = "PROMPT_TUNING MULTITASK_PROMPT_TUNING P_TUNING PREFIX_TUNING CPT CARTRIDGE"
_NAMED_AFTER_METHOD: Final = (
    "LORA ADAMSS BOFT IA3 BEFT LILY LOKR OFT POLY LN_TUNING FROD FOURIERFT GLORA HRA VBLORA UNILORA MISS RANDLORA ROAD "
    "TRAINABLE_TOKENS HIRA SHIRA C3A WAVEFT OSF DELORA GRALORA TINYLORA PSOFT PEANUT SHADOW SUPERTUNING DEFT"
)
ADAPTER_METHODS: Final[Mapping[str, str]] = {
    **dict.fromkeys(_PROMPTS.split(), "prompt_embeddings"),
    **{method: f"{method.lower()}_" for method in _NAMED_AFTER_METHOD.split()},
    "ADALORA": "lora_",
    "ADAPTION_PROMPT": "adaption_",
    "LOHA": "hada_",
    "VERA": "vera_lambda_",
    "PVERA": "pvera_lambda_",
    "XLORA": "xlora_",
}
"""For each method (``PeftType`` of peft 0.21.2), a text that the names of its parameters contain."""

_WITHOUT_TARGETS: Final[tuple[JSON, ...]] = (None, [], "dummy-target-modules")
"""Values of ``target_modules`` for a config that may train only the modules of its other options."""

_PARTNERS: Final = {"lora_A": "lora_B", "lora_B": "lora_A"} | {
    f"lora_embedding_{side}": f"lora_embedding_{other}" for side, other in ("AB", "BA")
}

_HEADS: Final[tuple[JSON, ...]] = ("classifier", "score")
"""PEFT adds both to the ``modules_to_save`` of a classifier, although its model has only one of them."""


class AdapterGaps(NamedTuple):
    """Parameters that are missing in a stored adapter, or may be missing. Each is described by a text for a message.

    Attributes:
        lacking: parameters that its config needs and that are not stored.
        unjudged: parameters that may be missing; the config does not state whether the model has them. Empty if there
            are lacking parameters.
    """

    lacking: tuple[str, ...]
    unjudged: tuple[str, ...]


def adapter_gaps(config: Mapping[str, JSON], names: Collection[str]) -> AdapterGaps:
    """Compare the config of an adapter with the names of its arrays."""
    method = config.get("peft_type")
    part = ADAPTER_METHODS.get(method) if isinstance(method, str) else None
    if part is None:
        return AdapterGaps((), (f"the method {str(method)[:80]!r} is not known, so parameters of it may be missing",))
    lacking: list[str] = []
    unjudged: list[str] = []
    if not any(part in name for name in names) and _has_targets(config):
        lacking.append(f"no array of the method {method} (no name has {part!r})")
    if part == "lora_":
        lacking.extend(f"{name}, because its pair is stored" for name in _unpaired(names))
    for option in ("target_modules", "modules_to_save"):
        listed = config.get(option)
        if option == "target_modules" and part != "lora_":
            continue  # other methods share their parameters between modules
        if isinstance(listed, list) and (absent := _not_stored(listed, names)):
            # a program may list modules that its model does not have
            (lacking if option == "modules_to_save" and len(absent) == len(listed) else unjudged).append(
                f"no array of {option} {', '.join(absent)[:200]}"
            )
    return AdapterGaps(tuple(lacking), () if lacking else tuple(unjudged))


def _has_targets(config: Mapping[str, JSON]) -> bool:
    others = config.get("trainable_token_indices") or config.get("modules_to_save")
    return not (others and config.get("target_modules", "") in _WITHOUT_TARGETS)


def _unpaired(names: Collection[str]) -> Iterable[str]:
    known = set(names)
    for name in names:
        segments = name.split(".")
        for number, segment in enumerate(segments):
            other = _PARTNERS.get(segment)
            pair = ".".join([*segments[:number], other or "", *segments[number + 1 :]])
            if other is not None and segments[-1] != "bias" and pair not in known:
                yield pair


def _not_stored(listed: Iterable[JSON], names: Iterable[str]) -> list[str]:
    dotted = [f".{name}." for name in names]
    absent = [module for module in listed if not any(f".{module}." in name for name in dotted)]
    has_head = any(module in _HEADS and module not in absent for module in listed)
    return [str(module) for module in absent if not (has_head and module in _HEADS)]
