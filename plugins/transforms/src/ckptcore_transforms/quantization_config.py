"""QuantizationConfig: what the config.json of a Hugging Face model says of how its weights are quantised; hostile until checked."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from ckptcore.errors import TransformError
from ckptcore.model.tree import JSON

__all__ = ["Block", "Packing", "QuantizationConfig", "listed", "read_quantization"]

_SHOWN: Final = 30
"""How many problems an error lists."""

Block: TypeAlias = tuple[int, ...] | None
"""Extents of a block along the last axes, in elements; None: the shape of the scales tells (`ckptcore_transforms.quantized_arrays.block_of`)."""

Packing: TypeAlias = Literal["fp4", "int8"]
"""What a byte is that is no float8: two numbers of MXFP4, or a whole number."""

_PLAIN_FORMATS: Final = ("float-quantized", "int-quantized", "naive-quantized", "mxfp8-quantized", "dense")
"""Of compressed-tensors: those that have values in the shape of the weight, one in an element."""

_LONGEST: Final = 1000
"""In characters. What is longer than any name of a module that a person wrote is not looked for."""

_FINE: Final = (128, 128)
"""What transformers' FineGrainedFP8Config takes where no block size is given; there may be one scale for all then, too (AutoFP8)."""


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """How weights are quantised.

    Attributes:
        method: the ``quant_method``.
        blocks: what blocks there may be.
        packing: what bytes are.
        kept: the names of modules, or ends of names, that are not quantised.
        has_cache_scales: whether there are scales for a cache of keys and values.
    """

    method: str
    blocks: tuple[Block, ...]
    packing: Packing
    kept: frozenset[str] = frozenset()
    has_cache_scales: bool = False

    def keeps(self, module: str) -> bool:
        """Whether a module is not quantised: it, one around it or the end of its name is listed.

        So far transformers' ``should_convert_module``, which takes what is listed as a regular expression, too. Those are not run here: a
        hostile one takes forever.
        """
        if not self.kept or len(module) > _LONGEST:
            return False
        parts = module.split(".")
        around = {".".join(parts[:stop]) for stop in range(1, len(parts) + 1)}
        ends = {".".join(parts[start:]) for start in range(1, len(parts))}
        return not self.kept.isdisjoint(around | ends)


def read_quantization(config: Mapping[str, JSON]) -> QuantizationConfig | None:
    """What a config.json says; None if it says nothing of that.

    The methods ``fp8`` and ``mxfp8`` (transformers' FineGrainedFP8Config; DeepSeek-V3's README_WEIGHTS.md; AutoFP8), ``fbgemm_fp8``, ``mxfp4``
    (gpt-oss), and of ``compressed-tensors`` what stores values in the shape of the weight (``quant_config.py``, ``quant_args.py``).

    Raises:
        TransformError: lists everything in it that is not known.
    """
    found = _section(config)
    if found is None:
        return None
    problems: list[str] = []
    if not isinstance(found, dict):
        raise _refused([f"it is {reprlib.repr(found)}, and an object was expected"])
    method = found.get("quant_method", "compressed-tensors" if "config_groups" in found else None)
    read = {
        "fp8": _read_fp8,
        "mxfp8": _read_fp8,
        "fbgemm_fp8": _read_by_shape,
        "mxfp4": _read_by_shape,
        "compressed-tensors": _read_compressed,
    }
    if not isinstance(method, str) or method not in read:
        raise _refused([f"quant_method is {reprlib.repr(method)}; known are {', '.join(read)}"])
    made = read[method](method, found, problems)
    if problems:
        raise _refused(problems)
    return made


def _section(config: Mapping[str, JSON]) -> JSON:
    """What is said of quantisation, of the model or of its part for text; None where nothing is."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        for name in (
            "quantization_config",
            "compression_config",
        ):  # the second one is compressed-tensors' of before 0.9
            if place.get(name) is not None:
                return place[name]
    return None


def _refused(problems: Sequence[str]) -> TransformError:
    return TransformError(
        f"the quantization_config of config.json is not understood:{listed(problems)}\n"
        "Name the arrays and their scales in Dequantize or DequantizeMxfp4, if they are of a format that these know"
    )


def _read_by_shape(method: str, found: Mapping[str, JSON], problems: list[str]) -> QuantizationConfig:
    return QuantizationConfig(method, (None,), "fp4", _kept(found, ("modules_to_not_convert",), problems))


def _read_fp8(method: str, found: Mapping[str, JSON], problems: list[str]) -> QuantizationConfig:
    blocks: tuple[Block, ...] = (None,)
    if "weight_block_size" not in found:
        blocks = (_FINE, None)
    elif found["weight_block_size"] is not None:
        blocks = (_block(found["weight_block_size"], "weight_block_size", problems),)
    format_of_scales = found.get("scale_fmt", "float")
    if format_of_scales not in ("float", "ue8m0"):
        problems.append(f"scale_fmt is {reprlib.repr(format_of_scales)}, and 'float' or 'ue8m0' was expected")
    return QuantizationConfig(
        method, blocks, "fp4", _kept(found, ("modules_to_not_convert", "ignored_layers"), problems)
    )


def _read_compressed(method: str, found: Mapping[str, JSON], problems: list[str]) -> QuantizationConfig:
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        problems.append(f"config_groups is {reprlib.repr(groups)}, and an object of at least one group was expected")
        groups = {}
    format_of_all = found.get("format", "float-quantized")
    blocks: dict[Block, None] = {}
    for name, group in groups.items():
        place = f"config_groups[{reprlib.repr(name)}]"
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(group, dict) or not isinstance(weights, dict):
            problems.append(f"{place} does not say how weights are quantised; an object of 'weights' was expected")
            continue
        stored_as = group.get("format") or format_of_all
        if stored_as not in _PLAIN_FORMATS:
            problems.append(f"{place} has the format {reprlib.repr(stored_as)}; known are {', '.join(_PLAIN_FORMATS)}")
        blocks[_group_block(place, weights, problems)] = None
    kept = _kept(found, ("ignore",), problems)
    return QuantizationConfig(method, tuple(blocks), "int8", kept, found.get("kv_cache_scheme") is not None)


def _group_block(place: str, weights: Mapping[str, JSON], problems: list[str]) -> Block:
    """The blocks of a group of compressed-tensors."""
    bits, kind, strategy = weights.get("num_bits", 8), weights.get("type", "int"), weights.get("strategy")
    if bits != 8 or kind not in ("float", "int"):
        problems.append(
            f"{place} has weights of {reprlib.repr(bits)} bits of {reprlib.repr(kind)}, and 8 of float or int were expected"
        )
    if weights.get("symmetric", True) is not True:
        problems.append(f"{place} is not symmetric: zero points are not known")
    if strategy in ("tensor", "channel", None) and weights.get("group_size") in (None, -1):
        return None
    if strategy == "block":
        return _block(weights.get("block_structure"), f"{place}: block_structure", problems)
    if strategy in ("group", None):
        return _block([1, weights.get("group_size")], f"{place}: group_size", problems)
    problems.append(f"{place} has the strategy {reprlib.repr(strategy)}; known are tensor, channel, group and block")
    return None


def _block(value: JSON, place: str, problems: list[str]) -> Block:
    """Extents of a block: two ints above 0."""
    if isinstance(value, list) and len(value) == 2:
        sizes = [size for size in value if type(size) is int and size > 0]
        if len(sizes) == 2:
            return tuple(sizes)
    problems.append(f"{place} is {reprlib.repr(value)}, and extents of two axes were expected")
    return None


def _kept(found: Mapping[str, JSON], names: Collection[str], problems: list[str]) -> frozenset[str]:
    """The modules that are listed under the first of some names that is there."""
    for name in names:
        listed = found.get(name)
        if listed is None:
            continue
        if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
            problems.append(f"{name} is {reprlib.repr(listed)}, and a list of names was expected")
            break
        return frozenset([one for one in listed if isinstance(one, str)])
    return frozenset()


def listed(problems: Sequence[str]) -> str:
    """Lines of an error: as many problems as a person reads."""
    lines = [f"\n  {problem}" for problem in _bounded(problems)]
    return "".join(lines)


def _bounded(problems: Sequence[str]) -> Iterator[str]:
    yield from problems[:_SHOWN]
    if len(problems) > _SHOWN:
        yield f"and {len(problems) - _SHOWN} more"
