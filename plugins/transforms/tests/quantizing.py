"""Quantised Hugging Face checkpoints as the tools of each format write them, and the values that the tools restore."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from examples.minilm.pretrained import model_directory

BLOCK = (128, 128)

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def minilm(layers: int = 1) -> dict[str, torch.Tensor]:
    """Return the first layers of a real encoder in bfloat16: 384 x 384 and 384 x 1536 matrices, vectors, 300 words."""
    weights = load_file(model_directory() / "model.safetensors")
    kept = {name for name in weights if not name.startswith("encoder.layer.")}
    kept |= {f"encoder.layer.{layer}." for layer in range(layers)}
    return {
        name: (weight[:300] if name.startswith("embeddings.word") else weight).to(torch.bfloat16).contiguous()
        for name, weight in weights.items()
        if name.startswith(tuple(kept)) and weight.is_floating_point()
    }


def quantized(name: str) -> bool:
    """Return True if the tools quantise a weight. They quantise matrices of layers, but no embedding tables."""
    return name.startswith("encoder.layer") and name.endswith(("dense.weight", "query.weight", "key.weight"))


def fp8_blocks(weight: torch.Tensor, block: tuple[int, int] = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values in float8 and scales of blocks. Edge blocks may be smaller (DeepSeek-V3: README_WEIGHTS.md)."""
    rows, columns = weight.shape
    grid = [-(-rows // block[0]), -(-columns // block[1])]
    values, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(grid)
    for row in range(grid[0]):
        for column in range(grid[1]):
            place = (
                slice(row * block[0], (row + 1) * block[0]),
                slice(column * block[1], (column + 1) * block[1]),
            )
            scales[row, column] = weight[place].float().abs().max().clamp(min=1e-12) / 448
            values[place] = (weight[place].float() / scales[row, column]).to(torch.float8_e4m3fn)
    return values, scales


def per_row(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values in float8 and a scale for each row, as FBGEMM and compressed-tensors store them."""
    scales = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
    return (weight.float() / scales).to(torch.float8_e4m3fn), scales


def per_tensor(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values in float8 and one scale, as AutoFP8 stores them."""
    scale = weight.float().abs().max() / 448
    return (weight.float() / scale).to(torch.float8_e4m3fn), scale


def mxfp4_experts(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks and scales of experts as gpt-oss stores them. The axes of `weights`: experts, outputs, inputs."""
    experts, outputs, inputs = weights.shape
    groups = weights.float().reshape(experts, outputs, inputs // 32, 32)
    exponents = torch.floor(torch.log2(groups.abs().amax(-1).clamp(min=2.0**-120))) - 2
    scaled = groups / torch.exp2(exponents)[..., None]
    codes = (scaled.abs()[..., None] - _FP4).abs().argmin(-1).to(torch.uint8) + 8 * (scaled < 0)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8), (exponents + 127).to(torch.uint8)


def publish(
    directory: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None, files: int = 1
) -> Path:
    """Write tensors as Hugging Face's tools do. Several files get an index, with scales in separate files."""
    directory.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors, key=lambda name: (name.endswith(("_inv", "_scale", "_scales")), name))
    share = -(-len(names) // files)
    weight_map: dict[str, str] = {}
    for number in range(files):
        file = "model.safetensors" if files == 1 else f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        own = names[number * share : (number + 1) * share]
        save_file(
            {name: tensors[name].clone(memory_format=torch.contiguous_format) for name in own},
            directory / file,
            {"format": "pt"},
        )
        weight_map |= dict.fromkeys(own, file)
    if files > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if config is not None:
        (directory / "config.json").write_text(json.dumps({"model_type": "bert", "quantization_config": config}))
    return directory


def turned_back(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the experts as transformers restores them."""
    made: torch.Tensor = convert_moe_packed_tensors(blocks, scales)
    return made
