"""`QuantizationConfig`: the quantisation in the config.json of a Hugging Face model, checked as hostile input."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from ckptcore.errors import TransformError
from ckptcore.model.tree import JSON

_MAX_SHOWN: Final = 30
"""Maximum number of problems in an error."""

Block: TypeAlias = tuple[int, ...] | None
"""Extents of a block along the last axes, in elements.

None: derived from the shape of the scales (`ckptcore_transforms.quantized_arrays.block_of`).
"""

Packing: TypeAlias = Literal["fp4", "int8"]
"""Meaning of an int8 element of a weight: two MXFP4 numbers (``fp4``), or an integer (``int8``)."""

_PLAIN_FORMATS: Final = ("float-quantized", "int-quantized", "naive-quantized", "mxfp8-quantized", "dense")
"""Formats of compressed-tensors with one value per element of the weight."""

_MAX_NAME_LENGTH: Final = 1000
"""Maximum length of a module name in characters. A longer name counts as not excluded."""

_FINE_GRAINED: Final = (128, 128)
"""Block size that transformers' FineGrainedFP8Config assumes if the config has none.

A config of AutoFP8 has no block size either, but means one scale per array.
"""


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """Quantisation of weights.

    Attributes:
        method: the ``quant_method``.
        blocks: possible block sizes.
        packing: meaning of int8 elements.
        excluded: modules that are not quantised: full names, suffixes, or outer modules.
        has_cache_scales: True if there are scales for a key-value cache.
    """

    method: str
    blocks: tuple[Block, ...]
    packing: Packing
    excluded: frozenset[str] = frozenset()
    has_cache_scales: bool = False

    def excludes(self, module: str) -> bool:
        """Return True if `excluded` lists a module, an outer module, or a suffix of its name.

        This is transformers' ``should_convert_module`` without its regular expressions, because a
        hostile expression can run forever.
        """
        if not self.excluded or len(module) > _MAX_NAME_LENGTH:
            return False
        parts = module.split(".")
        prefixes = {".".join(parts[:stop]) for stop in range(1, len(parts) + 1)}
        suffixes = {".".join(parts[start:]) for start in range(1, len(parts))}
        return not self.excluded.isdisjoint(prefixes | suffixes)


def read_quantization(config: Mapping[str, JSON]) -> QuantizationConfig | None:
    """Return the quantisation in a config.json, or None if the model is not quantised.

    Supports the methods ``fp8`` and ``mxfp8`` (transformers' FineGrainedFP8Config; DeepSeek-V3's
    README_WEIGHTS.md; AutoFP8), ``fbgemm_fp8``, ``mxfp4`` (gpt-oss), and ``compressed-tensors``
    with values in the shape of the weight (``quant_config.py``, ``quant_args.py``).

    Raises:
        TransformError: lists all unsupported settings.
    """
    section = _section(config)
    if section is None:
        return None
    problems: list[str] = []
    if not isinstance(section, dict):
        raise _refused([f"expected an object, found {reprlib.repr(section)}"])
    method = section.get("quant_method", "compressed-tensors" if "config_groups" in section else None)
    read = {
        "fp8": _read_fp8,
        "mxfp8": _read_fp8,
        "fbgemm_fp8": _read_by_shape,
        "mxfp4": _read_by_shape,
        "compressed-tensors": _read_compressed,
    }
    if not isinstance(method, str) or method not in read:
        raise _refused([f"quant_method is {reprlib.repr(method)}; expected one of {', '.join(read)}"])
    result = read[method](method, section, problems)
    if problems:
        raise _refused(problems)
    return result


def _section(config: Mapping[str, JSON]) -> JSON:
    """Return the quantisation of the model or its text part, or None."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        # compressed-tensors before 0.9 wrote "compression_config".
        for name in ("quantization_config", "compression_config"):
            if part.get(name) is not None:
                return part[name]
    return None


def _refused(problems: Sequence[str]) -> TransformError:
    return TransformError(
        f"the quantization_config of config.json is not supported:{format_problems(problems)}\nFor values in the "
        "shape of the weight, times scales of blocks, use Dequantize(values, scales, block); for MXFP4, "
        "DequantizeMxfp4(blocks, scales, to)"
    )


def _read_by_shape(method: str, section: Mapping[str, JSON], problems: list[str]) -> QuantizationConfig:
    return QuantizationConfig(method, (None,), "fp4", _excluded_modules(section, ("modules_to_not_convert",), problems))


def _read_fp8(method: str, section: Mapping[str, JSON], problems: list[str]) -> QuantizationConfig:
    blocks: tuple[Block, ...] = (None,)
    if "weight_block_size" not in section:
        blocks = (_FINE_GRAINED, None)
    elif section["weight_block_size"] is not None:
        blocks = (_block(section["weight_block_size"], "weight_block_size", problems),)
    format_of_scales = section.get("scale_fmt", "float")
    if format_of_scales not in ("float", "ue8m0"):
        problems.append(f"scale_fmt is {reprlib.repr(format_of_scales)}; expected 'float' or 'ue8m0'")
    return QuantizationConfig(
        method, blocks, "fp4", _excluded_modules(section, ("modules_to_not_convert", "ignored_layers"), problems)
    )


def _read_compressed(method: str, section: Mapping[str, JSON], problems: list[str]) -> QuantizationConfig:
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        problems.append(f"config_groups is {reprlib.repr(groups)}; expected an object with at least one group")
        groups = {}
    format_of_all = section.get("format", "float-quantized")
    blocks: dict[Block, None] = {}
    for name, group in groups.items():
        where = f"config_groups[{reprlib.repr(name)}]"
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(group, dict) or not isinstance(weights, dict):
            problems.append(f"{where} has no quantisation of weights; expected an object 'weights'")
            continue
        stored_as = group.get("format") or format_of_all
        if stored_as not in _PLAIN_FORMATS:
            problems.append(
                f"{where} has the format {reprlib.repr(stored_as)}; expected one of {', '.join(_PLAIN_FORMATS)}"
            )
        blocks[_group_block(where, weights, problems)] = None
    excluded = _excluded_modules(section, ("ignore",), problems)
    return QuantizationConfig(method, tuple(blocks), "int8", excluded, section.get("kv_cache_scheme") is not None)


def _group_block(where: str, weights: Mapping[str, JSON], problems: list[str]) -> Block:
    """Return the block size of a group of compressed-tensors. Adds unsupported settings to `problems`."""
    bits, kind, strategy = weights.get("num_bits", 8), weights.get("type", "int"), weights.get("strategy")
    if bits != 8 or kind not in ("float", "int"):
        problems.append(
            f"{where} has weights of {reprlib.repr(bits)} bits of {reprlib.repr(kind)}; expected 8 bits of float or int"
        )
    if weights.get("symmetric", True) is not True:
        problems.append(f"{where} is not symmetric: zero points are not supported")
    if strategy in ("tensor", "channel", None) and weights.get("group_size") in (None, -1):
        return None
    if strategy == "block":
        return _block(weights.get("block_structure"), f"{where}: block_structure", problems)
    if strategy in ("group", None):
        return _block([1, weights.get("group_size")], f"{where}: group_size", problems)
    problems.append(f"{where} has the strategy {reprlib.repr(strategy)}; expected tensor, channel, group and block")
    return None


def _block(value: JSON, where: str, problems: list[str]) -> Block:
    """Parse the extents of a block: two positive integers. If it is anything else, add a problem."""
    if isinstance(value, list) and len(value) == 2:
        sizes = [size for size in value if type(size) is int and size > 0]
        if len(sizes) == 2:
            return tuple(sizes)
    problems.append(f"{where} is {reprlib.repr(value)}; expected two positive integers")
    return None


def _excluded_modules(section: Mapping[str, JSON], names: Collection[str], problems: list[str]) -> frozenset[str]:
    """Return the modules listed under the first existing name."""
    for name in names:
        modules = section.get(name)
        if modules is None:
            continue
        if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
            problems.append(f"{name} is {reprlib.repr(modules)}; expected a list of names")
            break
        return frozenset([module for module in modules if isinstance(module, str)])
    return frozenset()


def format_problems(problems: Sequence[str]) -> str:
    """Return lines of an error for a limited number of problems."""
    lines = [f"\n  {problem}" for problem in _bounded(problems)]
    return "".join(lines)


def _bounded(problems: Sequence[str]) -> Iterator[str]:
    yield from problems[:_MAX_SHOWN]
    if len(problems) > _MAX_SHOWN:
        yield f"and {len(problems) - _MAX_SHOWN} more"
