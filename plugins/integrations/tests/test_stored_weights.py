"""Weights that are read when they are copied."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptcore_integrations.stored_weights import StoredWeight, WeightReader, strided_box

import ckptcore
from ckptcore import Context

WEIGHTS: dict[str, Any] = {
    "a": torch.arange(720.0).reshape(6, 8, 15),
    "b": torch.arange(12),
    "empty": torch.zeros(0, 3),
    "half": torch.arange(40).bfloat16().reshape(5, 8),
    "scalar": torch.tensor(3.0),
}


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[str, Any]]:
    location = str(tmp_path / "1")
    ckptcore.save(location, {"layers": [WEIGHTS]})
    with ckptcore.open(location) as checkpoint:
        yield location, checkpoint


def reader_of(opened: tuple[str, Any], *, defer: bool = True) -> tuple[WeightReader, dict[str, Any]]:
    """Return a reader, and its weights by name."""
    context = Context()
    reader = WeightReader(opened[0], opened[1], (context, context), defer=defer, batch_bytes=1 << 30)
    weights = dict(reader.weights(lambda name, dtype: getattr(torch, dtype)))
    return reader, {name.removeprefix("layers.0."): weight for name, weight in weights.items()}


VIEWS: list[Callable[[Any, int, int, random.Random], Any]] = [
    lambda tensor, axis, start, choices: tensor.narrow(axis, start, choices.randint(1, tensor.shape[axis] - start)),
    lambda tensor, axis, start, choices: tensor.transpose(axis, choices.randrange(tensor.ndim)),
    lambda tensor, axis, start, choices: tensor.select(axis, start),
    lambda tensor, axis, start, choices: tensor.unsqueeze(axis),
    lambda tensor, axis, start, choices: tensor.reshape(-1) if tensor.is_contiguous() else tensor,
    lambda tensor, axis, start, choices: tensor.unsqueeze(0).expand(3, *tensor.shape),
    lambda tensor, axis, start, choices: tensor.chunk(2, axis)[-1],
    lambda tensor, axis, start, choices: tensor[(slice(None),) * axis + (slice(None, None, 2),)],
    lambda tensor, axis, start, choices: tensor.flatten(axis) if tensor.is_contiguous() else tensor,
]


def view_of(tensor: Any, choices: random.Random) -> Any:
    """Return a random view of a tensor."""
    for _ in range(choices.randint(0, 5)):
        if tensor.ndim and tensor.numel():
            axis = choices.randrange(tensor.ndim)
            tensor = choices.choice(VIEWS)(tensor, axis, choices.randrange(tensor.shape[axis]), choices)
    return tensor


@pytest.mark.parametrize("defer", [True, False])
def test_a_copy_of_a_view_is_that_of_the_array(opened: tuple[str, Any], *, defer: bool) -> None:
    for seed in range(25):
        reader, weights = reader_of(opened, defer=defer)
        name = random.Random(seed).choice(sorted(WEIGHTS))
        found, expected = (view_of(tensor, random.Random(seed)) for tensor in (weights[name], WEIGHTS[name]))
        assert isinstance(found, StoredWeight)
        target = torch.empty_like(expected)
        with reader:
            target.copy_(found)
        reader.fill()
        assert torch.equal(target, expected), seed


def test_the_box_of_a_view_has_no_more_than_its_rows() -> None:
    array = torch.empty(6, 8, 15, device="meta")
    assert strided_box(array.shape, array[2:4, :, 5:7]).box == ((2, 0, 5), (4, 8, 7))
    assert strided_box(array.shape, array.transpose(0, 2)[3]).box == ((0, 0, 3), (6, 8, 4))
    assert strided_box(array.shape, array.reshape(48, 15)[9:17]).box == ((1, 0, 0), (3, 8, 15))


def test_copies_are_done_before_another_operation_needs_them(opened: tuple[str, Any]) -> None:
    reader, weights = reader_of(opened)
    copied, large = torch.zeros(6, 8, 15), torch.zeros(10, 8, 15)
    with reader:
        copied.copy_(weights["a"])
        assert torch.equal(copied * 2, WEIGHTS["a"] * 2)
        large[:6].copy_(weights["a"])
        large[6:].fill_(7)  # other elements of the same memory
        assert not large[:6].detach().numpy().any()
        assert weights["b"].sum().item() == 66
        assert torch.equal(weights["half"] + 1, WEIGHTS["half"] + 1)
    reader.fill()
    assert torch.equal(large[:6], WEIGHTS["a"]) and (large[6:] == 7).all()


def test_a_copy_that_is_only_counted_reads_nothing(opened: tuple[str, Any]) -> None:
    reader, weights = reader_of(opened)
    with reader:
        torch.empty(6, 8, 15, device="meta").copy_(weights["a"])
    assert opened[1].bytes_read == 0
    with pytest.raises(RuntimeError, match="must match"):  # PyTorch's own error, with the shapes
        torch.empty(6, 8, 14).copy_(weights["a"])


def test_one_copy_of_several_views_reads_their_boxes_once(opened: tuple[str, Any]) -> None:
    reader, weights = reader_of(opened)
    targets = [torch.zeros(3, 8, 15) for _ in range(3)]
    with reader:
        for start, target in enumerate(targets):
            target.copy_(weights["a"][start : start + 3])
    reader.fill()
    for start, target in enumerate(targets):
        assert torch.equal(target, WEIGHTS["a"][start : start + 3])
