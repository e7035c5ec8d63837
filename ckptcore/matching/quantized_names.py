"""Names of the scales of quantised arrays in checkpoints of Hugging Face.

A load refuses to cast a quantised array without its scales, because the numbers would be wrong. It needs these names
even if the distribution of transforms is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ckptcore.model.arrays import ArraySpec
from ckptcore.model.metadata import ArrayRecord, TreeMetadata

WEIGHT: Final = ".weight"

SCALES: Final = ("_scale_inv", "_scale")
"""Suffixes that follow the name of the array. The first is of DeepSeek-V3, Qwen 3 and transformers, the second of
AutoFP8, FBGEMM and compressed-tensors."""

_SCALES_OF_MODULES: Final = (".scale", ".qscale_weight")
"""Suffixes that replace ``.weight``. The first is of DeepSeek-V4, the second of Mistral Large 4. See
``quantizer_finegrained_fp8.py`` of transformers."""

BLOCKS: Final = "_blocks"
SCALES_OF_BLOCKS: Final = "_scales"
"""Suffixes of the names of arrays and of their scales in gpt-oss with MXFP4."""


_SHOWN: Final = 100
"""Limit of a name in messages, in characters: names may be hostile."""


def is_quantized(spec: ArraySpec) -> bool:
    """Return True for dtypes of quantised weights, which are stored with scales."""
    return spec.dtype in ("int8", "int4") or (
        spec.dtype.startswith(("float8_", "float6_", "float4_")) and spec.dtype != "float8_e8m0fnu"
    )


def names_of_scales(name: str) -> list[str]:
    """Return the possible names of the scales of an array."""
    names = [name + end for end in SCALES]
    if name.endswith(WEIGHT):
        names += [name.removesuffix(WEIGHT) + end for end in _SCALES_OF_MODULES]
    return names


def find_scales(tree: TreeMetadata) -> Iterator[tuple[int, int]]:
    """Yield the leaf number of each quantised array of a tree with the leaf number of its scales.

    Skips arrays whose scales are not found.
    """
    names = {"/".join(map(str, path)): number for number, path in enumerate(tree.paths)}
    for name, number in names.items():
        record = tree.leaves[number]
        if not isinstance(record, ArrayRecord):
            continue
        expected = names_of_scales(name) if is_quantized(record.spec) else []
        if name.endswith(BLOCKS) and record.spec.dtype == "uint8":
            expected = [name.removesuffix(BLOCKS) + SCALES_OF_BLOCKS]
        found = next((names[scales] for scales in expected if scales in names), None)
        if found is not None:
            yield number, found


def find_quantized(tree: TreeMetadata) -> str | None:
    """Return a description of one quantised array of a tree and its scales; None if there is none."""
    for number, scales in find_scales(tree):
        name, scales_name = ("/".join(map(str, tree.paths[one]))[:_SHOWN] for one in (number, scales))
        record = tree.leaves[number]
        assert isinstance(record, ArrayRecord)  # `find_scales` finds only arrays
        return f"{name!r} is {record.spec}, and its scales are {scales_name!r}"
    return None
