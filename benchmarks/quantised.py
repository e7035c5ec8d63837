"""Quantised weights loaded as bfloat16, beside what the owners of the formats do: transformers, and torch's reader of such checkpoints.

All sides make the same bits, which is checked first. Transformers and safetensors verify nothing; what is published has no checksums, so ckptcore does not either.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import ckptcore
from benchmarks.alternating import Contender
from benchmarks.cases import Case, State
from ckptcore.transforms import DequantizeAsConfigured

__all__ = ["QUANTISED_GIGABYTES", "quantised_cases"]

_SIDE = 4096
_MATRICES = 12
_EXPERTS, _OUTPUTS, _INPUTS = 16, 2880, 2880
_BLOCK = 128

QUANTISED_GIGABYTES = 0.4
"""Of bfloat16 that each case makes, about."""


def quantised_cases(directory: Path) -> Sequence[Case]:
    """Blocks of float8 as DeepSeek-V3 has them, and experts in MXFP4 as gpt-oss has them.

    Args:
        directory: where the checkpoints are written.

    Raises:
        AssertionError: if one of the contenders makes other bits.
    """
    return [_float8(directory / "fp8"), _mxfp4(directory / "mxfp4")]


def _float8(directory: Path) -> Case:
    generator = torch.Generator().manual_seed(0)
    stored: State = {}
    for number in range(_MATRICES):
        name = f"model.layers.{number}.mlp.up_proj.weight"
        stored[name] = torch.randn(_SIDE, _SIDE, generator=generator).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = torch.rand(_SIDE // _BLOCK, _SIDE // _BLOCK, generator=generator)
    names = [name for name in stored if name.endswith(".weight")]
    _publish(directory, stored, {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]})
    del stored
    target = {name: torch.empty(_SIDE, _SIDE, dtype=torch.bfloat16, device="meta") for name in names}
    owner = Fp8Dequantize(None)

    def transformers_way() -> State:
        held = safetensors.torch.load_file(directory / "model.safetensors")
        return {name: owner._dequantize_one(held[name], held[f"{name}_scale_inv"], torch.bfloat16) for name in names}

    def torch_way() -> State:
        made = {name: torch.empty(_SIDE, _SIDE, dtype=torch.bfloat16) for name in names}
        reader = QuantizedHuggingFaceStorageReader(str(directory), target_dtype=torch.bfloat16)
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            state_dict_loader.load(made, storage_reader=reader, no_dist=True)
        return made

    ways = {
        "load_file, transformers": transformers_way,
        "ckptcore.load": lambda: _ours(directory, target),
        "torch, QuantizedHuggingFaceStorageReader": torch_way,
    }
    return _case("dequantise: float8 by blocks", ways, 1.0)


def _mxfp4(directory: Path) -> Case:
    generator = torch.Generator().manual_seed(0)
    groups = _INPUTS // 32
    blocks = torch.randint(0, 256, (_EXPERTS, _OUTPUTS, groups, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 130, (_EXPERTS, _OUTPUTS, groups), dtype=torch.uint8, generator=generator)
    name = "model.layers.0.mlp.experts.down_proj"
    _publish(directory, {f"{name}_blocks": blocks, f"{name}_scales": scales}, {"quant_method": "mxfp4"})
    del blocks, scales
    target = {name: torch.empty(_EXPERTS, _INPUTS, _OUTPUTS, dtype=torch.bfloat16, device="meta")}

    def transformers_way() -> State:
        held = safetensors.torch.load_file(directory / "model.safetensors")
        return {name: convert_moe_packed_tensors(held[f"{name}_blocks"], held[f"{name}_scales"])}

    ways = {"load_file, transformers": transformers_way, "ckptcore.load": lambda: _ours(directory, target)}
    return _case("dequantise: MXFP4 experts", ways, 1.0)


def _ours(directory: Path, target: State) -> State:
    made: State = ckptcore.load(directory, target, transforms=[DequantizeAsConfigured("bfloat16")])
    return made


def _case(name: str, ways: Mapping[str, Callable[[], State]], target: float) -> Case:
    """A case of contenders that make the same.

    Raises:
        AssertionError
    """
    first, *others = ways
    expected = ways[first]()
    for other in others:
        made = ways[other]()
        for key, tensor in expected.items():
            same = made[key].dtype == tensor.dtype and torch.equal(made[key].contiguous(), tensor.contiguous())
            assert same, f"{other} makes something else of {key}"
    return Case(name, [Contender(way, run) for way, run in ways.items()], target)


def _publish(directory: Path, tensors: State, quantization: Mapping[str, object]) -> None:
    """As Hugging Face's tools write it."""
    directory.mkdir()
    safetensors.torch.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps({"quantization_config": quantization}), encoding="utf-8")
