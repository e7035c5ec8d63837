"""Remedies in error texts for files of `torch.save`: each is followed as the text says, and the values come back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptcore
from ckptcore.errors import CheckpointError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

VALUES = torch.arange(6.0).reshape(2, 3)
SPARSE = VALUES.to_sparse()
QUANTIZED: Callable[[], torch.Tensor] = lambda: torch.quantize_per_tensor(VALUES, 0.5, 1, torch.qint8)  # it warns
IN_PARTS = [
    (lambda: SPARSE, "save its indices and values", lambda it: [it.coalesce().indices(), it.coalesce().values()]),
    (lambda: SPARSE, "or tensor.to_dense()", lambda it: it.to_dense()),
    (QUANTIZED, "save tensor.int_repr() with its", lambda it: [it.int_repr(), it.q_scale(), it.q_zero_point()]),
    (QUANTIZED, "or tensor.dequantize()", lambda it: it.dequantize()),
    (
        lambda: torch.nested.nested_tensor([VALUES[0], VALUES[1, :2]]),
        "save the tensors of tensor.unbind()",
        lambda it: list(it.unbind()),
    ),
    (lambda: torch.empty(2, device="meta"), "materialize it first", lambda it: torch.zeros_like(it, device="cpu")),
    (
        lambda: torch.complex(VALUES, VALUES).conj(),
        "save tensor.resolve_conj().resolve_neg()",
        lambda it: it.resolve_conj().resolve_neg(),
    ),
]


def same(left: Any, right: Any) -> bool:
    """Compare nested values, tensors bit for bit."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize(("make", "text", "follow"), IN_PARTS)
def test_tensors_in_files_of_torch_save(tmp_path: Path, make: Any, text: str, follow: Any) -> None:
    value = make()
    torch.save({"w": value}, tmp_path / "refused.pt")
    try:
        loaded = ckptcore.load(tmp_path / "refused.pt", framework="torch")
    except CheckpointError as error:
        assert text in str(error)
    else:  # it loads without the remedy
        assert same(loaded["w"], value)
    torch.save({"w": follow(value)}, tmp_path / "followed.pt")
    assert same(ckptcore.load(tmp_path / "followed.pt", framework="torch")["w"], follow(value))


def test_cycles_in_files_of_torch_save(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": VALUES}
    torch.save({**state, "self": state} | {"self": state}, tmp_path / "sound.pt")
    assert same(ckptcore.load(tmp_path / "sound.pt", framework="torch")["self"]["w"], VALUES)
    state["self"] = state
    torch.save(state, tmp_path / "cycle.pt")
    with pytest.raises(CheckpointError, match="save a tree without cycles"):
        ckptcore.load(tmp_path / "cycle.pt")


def test_the_layout_of_torch_save_only_reads(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="save with layout='dcp', 'safetensors'"):
        ckptcore.save(tmp_path / "c", {"w": VALUES}, layout="torch")
    for layout in ("dcp", "safetensors"):
        ckptcore.save(tmp_path / layout, {"w": VALUES}, layout=layout)
        assert same(ckptcore.load(tmp_path / layout, framework="torch")["w"], VALUES)
