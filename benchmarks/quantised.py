"""Quantised weights loaded as bfloat16, compared with transformers and with the reader of PyTorch.

All contenders produce the same bits, which is checked first. None verifies checksums: the published files have none.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import safetensors.torch
import torch
from ckptcore_transforms import DequantizeAsConfigured
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import ckptcore
from benchmarks.alternating import Case, Contender, compare
from benchmarks.local import State
from benchmarks.report import Row
from benchmarks.setting import Setting

_MATRICES = 12
_BLOCK = 128
_TARGETS = {"load_file, transformers": 1.0}


def rows(setting: Setting) -> Iterator[Row]:
    """Measure blocks of float8 as in DeepSeek-V3, and experts in MXFP4 as in gpt-oss.

    Raises:
        AssertionError: if a contender loads other bits than the first one.
    """
    for case in (_float8(setting), _mxfp4(setting)):
        yield from compare(case, setting.rounds)


def _float8(setting: Setting) -> Case:
    directory, side = setting.directory / "fp8", setting.side(4096, _BLOCK)
    generator = torch.Generator().manual_seed(0)
    stored: State = {}
    for number in range(_MATRICES):
        name = f"model.layers.{number}.mlp.up_proj.weight"
        stored[name] = torch.randn(side, side, generator=generator).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = torch.rand(side // _BLOCK, side // _BLOCK, generator=generator)
    names = [name for name in stored if name.endswith(".weight")]
    _publish(directory, stored, {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]})
    del stored
    target = {name: torch.empty(side, side, dtype=torch.bfloat16, device="meta") for name in names}
    owner = Fp8Dequantize(None)

    def transformers_way() -> State:
        held = safetensors.torch.load_file(directory / "model.safetensors")
        return {name: owner._dequantize_one(held[name], held[f"{name}_scale_inv"], torch.bfloat16) for name in names}

    def torch_way() -> State:
        loaded = {name: torch.empty(side, side, dtype=torch.bfloat16) for name in names}
        reader = QuantizedHuggingFaceStorageReader(str(directory), target_dtype=torch.bfloat16)
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            state_dict_loader.load(loaded, storage_reader=reader, no_dist=True)
        return loaded

    ways = {
        "ckptcore.load": lambda: _ours(directory, target),
        "load_file, transformers": transformers_way,
        "torch, QuantizedHuggingFaceStorageReader": torch_way,
    }
    return _case("dequantise: float8 by blocks", ways)


def _mxfp4(setting: Setting) -> Case:
    directory, experts, outputs = setting.directory / "mxfp4", 16, setting.side(2880, 32)
    inputs = outputs
    generator = torch.Generator().manual_seed(0)
    groups = inputs // 32
    blocks = torch.randint(0, 256, (experts, outputs, groups, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 130, (experts, outputs, groups), dtype=torch.uint8, generator=generator)
    name = "model.layers.0.mlp.experts.down_proj"
    _publish(directory, {f"{name}_blocks": blocks, f"{name}_scales": scales}, {"quant_method": "mxfp4"})
    del blocks, scales
    target = {name: torch.empty(experts, inputs, outputs, dtype=torch.bfloat16, device="meta")}

    def transformers_way() -> State:
        held = safetensors.torch.load_file(directory / "model.safetensors")
        return {name: convert_moe_packed_tensors(held[f"{name}_blocks"], held[f"{name}_scales"])}

    ways = {"ckptcore.load": lambda: _ours(directory, target), "load_file, transformers": transformers_way}
    return _case("dequantise: MXFP4 experts", ways)


def _ours(directory: Path, target: State) -> State:
    loaded: State = ckptcore.load(directory, target, transforms=[DequantizeAsConfigured("bfloat16")])
    return loaded


def _case(name: str, ways: Mapping[str, Callable[[], State]]) -> Case:
    """Return a case of contenders that load the same bits.

    Raises:
        AssertionError: if a contender loads other bits than the first one.
    """
    first, *others = ways
    expected = ways[first]()
    for other in others:
        loaded = ways[other]()
        for key, tensor in expected.items():
            same = loaded[key].dtype == tensor.dtype and torch.equal(loaded[key].contiguous(), tensor.contiguous())
            assert same, f"{other} makes something else of {key}"
    nbytes = sum(tensor.nbytes for tensor in expected.values())
    return Case(name, [Contender(way, run, target=_TARGETS.get(way)) for way, run in ways.items()], nbytes)


def _publish(directory: Path, tensors: State, quantization: Mapping[str, object]) -> None:
    """Write a checkpoint as the tools of Hugging Face do."""
    directory.mkdir()
    safetensors.torch.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps({"quantization_config": quantization}), encoding="utf-8")
