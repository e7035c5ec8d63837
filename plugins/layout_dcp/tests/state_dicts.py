"""State dicts to save and load, with torch.distributed.checkpoint as the reference."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from ckptcore_dcp.stored_tensors import TORCH_DTYPES
from ckptcore_testing import DTYPE_NAMES, bit_patterns
from torch.distributed.checkpoint.metadata import Metadata

from ckptcore.model import ArraySpec

VERSION = ("1.0.0",) if "version" in [field.name for field in dataclasses.fields(Metadata)] else ()
"""Additional arguments of `Metadata`. PyTorch before 2.8 has none."""

DTYPES = sorted(name for name in DTYPE_NAMES if TORCH_DTYPES.get(name) == name)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of the elements in C order."""
    if not tensor.numel():
        return b""
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())


def tensor_of(spec: ArraySpec, seed: int = 0) -> torch.Tensor:
    """Return a tensor with the elements of `bit_patterns`."""
    flat = torch.from_numpy(np.frombuffer(bit_patterns(spec, seed).tobytes(), np.uint8).copy())
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return flat.view(dtype).reshape(spec.shape) if flat.numel() else torch.empty(spec.shape, dtype=dtype)


def loaded(location: Path, like: dict[str, Any]) -> dict[str, Any]:
    """Load a state dict with `dcp.load` and return it."""
    dcp.load(like, checkpoint_id=location, no_dist=True)
    return like


NESTED: dict[str, Any] = {
    "model": {"layer.0.weight": torch.randn(3, 2), "layer": {"1": {"bias": torch.randn(2)}}},
    "list": [torch.ones(2), {"inner": torch.zeros(1), "lr": 0.1}, [torch.full((1,), 5)]],
    "plain list": [1, 2.5, "three", None],
    "tuple": (0.9, 0.999),
    "nested tuple": ((1, 2), (3, (4,))),
    "step": 7,
    "big": -(2**70),
    "nan is not equal": 1.5,
    "flag": True,
    "none": None,
    "text": "größe\n",
    "bytes": b"\x00\xff",
    "complex": 1 - 2j,
    "empty list": [],
    "empty tuple": (),
    "odd key.with.dots": {"a.b": torch.arange(3), "": 4},
    "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1, 2]}, {"lr": 0.2, "params": []}],
}


def blank(value: Any) -> Any:
    """Return a state dict with the same structure and empty tensors."""
    if isinstance(value, dict):
        return {key: blank(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [blank(inner) for inner in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def assert_same(actual: Any, expected: Any, path: str = "") -> None:
    """Assert equal types, keys and elements."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor) and actual.dtype == expected.dtype, path
        assert actual.shape == expected.shape and bytes_of(actual) == bytes_of(expected), path
    elif isinstance(expected, dict):
        assert isinstance(actual, dict) and list(actual) == list(expected), path
        for key in expected:
            assert_same(actual[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, list | tuple):
        assert type(actual) is type(expected) and len(actual) == len(expected), path
        for number, (item, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same(item, other, f"{path}/{number}")
    else:
        assert type(actual) is type(expected) and actual == expected, path


def network(seed: int) -> torch.nn.Sequential:
    """Return a model with parameters and buffers."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> list[float]:
    """Train three steps and return their losses, which depend only on the seed, the model and the optimizer state."""
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(6, 4, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def saved(state: dict[str, Any], location: Path, **options: Any) -> None:
    """Save with torch in one process."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(location, **options), no_dist=True)
