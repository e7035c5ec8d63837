"""Stored weights: their elements are read when they are copied."""

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
def checkpoint(tmp_path: Path) -> Iterator[tuple[str, Any]]:
    location = str(tmp_path / "1")
    ckptcore.save(location, {"layers": [WEIGHTS]})
    with ckptcore.open(location) as checkpoint:
        yield location, checkpoint


def reader_of(checkpoint: tuple[str, Any], *targets: torch.Tensor) -> tuple[WeightReader, dict[str, Any]]:
    """Return a reader, and its weights by name."""
    context = Context()
    reader = WeightReader(checkpoint[0], checkpoint[1], (context, context), targets=targets, batch_bytes=1 << 30)
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
def test_a_copy_of_a_view_equals_the_view_of_the_array(checkpoint: tuple[str, Any], *, defer: bool) -> None:
    for seed in range(25):
        name = random.Random(seed).choice(sorted(WEIGHTS))
        expected = view_of(WEIGHTS[name], random.Random(seed))
        target = torch.empty_like(expected)
        reader, weights = reader_of(checkpoint, *([target] if defer else []))
        view_of_weight = view_of(weights[name], random.Random(seed))
        assert isinstance(view_of_weight, StoredWeight)
        with reader:
            target.copy_(view_of_weight)
        reader.fill()
        assert torch.equal(target, expected), seed


def test_the_box_of_a_view_has_no_more_than_its_rows() -> None:
    array = torch.empty(6, 8, 15, device="meta")
    assert strided_box(array.shape, array[2:4, :, 5:7]).box == ((2, 0, 5), (4, 8, 7))
    assert strided_box(array.shape, array.transpose(0, 2)[3]).box == ((0, 0, 3), (6, 8, 4))
    assert strided_box(array.shape, array.reshape(48, 15)[9:17]).box == ((1, 0, 0), (3, 8, 15))


def test_deferred_copies_run_before_another_operation_needs_them(checkpoint: tuple[str, Any]) -> None:
    copied, large = torch.zeros(6, 8, 15), torch.zeros(10, 8, 15)
    reader, weights = reader_of(checkpoint, copied, large)
    with reader:
        copied.copy_(weights["a"])
        assert torch.equal(copied * 2, WEIGHTS["a"] * 2)
        large[:6].copy_(weights["a"])
        large[6:].fill_(7)  # writes other elements of the same memory
        assert not large[:6].detach().numpy().any()
        assert weights["b"].sum().item() == 66
        assert torch.equal(weights["half"] + 1, WEIGHTS["half"] + 1)
    reader.fill()
    assert torch.equal(large[:6], WEIGHTS["a"]) and (large[6:] == 7).all()


def test_a_copy_to_a_meta_tensor_reads_nothing(checkpoint: tuple[str, Any]) -> None:
    reader, weights = reader_of(checkpoint)
    with reader:
        torch.empty(6, 8, 15, device="meta").copy_(weights["a"])
    assert checkpoint[1].bytes_read == 0
    with pytest.raises(RuntimeError, match="must match"):  # PyTorch's own error, with the shapes
        torch.empty(6, 8, 14).copy_(weights["a"])


def test_copies_of_several_views_are_filled_together(checkpoint: tuple[str, Any]) -> None:
    targets = [torch.zeros(3, 8, 15) for _ in range(3)]
    reader, weights = reader_of(checkpoint, *targets)
    with reader:
        for start, target in enumerate(targets):
            target.copy_(weights["a"][start : start + 3])
    reader.fill()
    for start, target in enumerate(targets):
        assert torch.equal(target, WEIGHTS["a"][start : start + 3])


def test_a_weight_is_not_changed_in_place(checkpoint: tuple[str, Any]) -> None:
    reader, weights = reader_of(checkpoint)
    changes: list[Callable[[Any], Any]] = [
        lambda weight: weight.mul_(2),
        lambda weight: weight[0:2].add_(1),
        lambda weight: weight.data.zero_(),
        lambda weight: weight.t_(),
    ]
    with reader:
        for change in changes:
            with pytest.raises(ValueError, match=r"in place, which is only read: call clone\(\) of it first"):
                change(weights["half"])
        assert torch.equal(weights["half"].clone().mul_(2), WEIGHTS["half"] * 2)


@pytest.mark.parametrize(
    "view",
    [
        lambda weight: weight[1:2].view(torch.uint8),
        lambda weight: weight[3:5].view(torch.float16),
        lambda weight: weight[:, 0:4].view(torch.float32),
        lambda weight: weight[2:].view(torch.int16)[1:, 3],
    ],
)
def test_a_view_with_another_dtype_has_the_bytes_of_the_array(checkpoint: tuple[str, Any], view: Any) -> None:
    reader, weights = reader_of(checkpoint)
    stored, expected = view(weights["half"]), view(WEIGHTS["half"])
    target = torch.empty_like(expected)
    with reader:
        target.copy_(stored)
    reader.fill()
    assert torch.equal(target.view(torch.uint8), expected.contiguous().view(torch.uint8))


def test_only_copies_to_targets_are_deferred(checkpoint: tuple[str, Any]) -> None:
    parameter, other = torch.zeros(6, 8, 15), torch.zeros(6, 8, 15)
    reader, weights = reader_of(checkpoint, parameter)
    with reader:
        other.copy_(weights["a"])
        parameter.copy_(weights["a"])
        assert torch.from_numpy(other.numpy()).equal(WEIGHTS["a"])
        assert not parameter.numpy().any()
    reader.fill()
    assert torch.equal(parameter, WEIGHTS["a"])


def test_a_failed_copy_can_be_repeated(checkpoint: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = torch.zeros(6, 8, 15)
    reader, weights = reader_of(checkpoint, parameter)
    with reader:
        parameter.copy_(weights["a"])
        with monkeypatch.context() as patch, pytest.raises(OSError, match="gone"):
            patch.setattr(ckptcore, "load", lambda *arguments, **options: (_ for _ in ()).throw(OSError("gone")))
            parameter.sum()
    reader.fill()
    assert torch.equal(parameter, WEIGHTS["a"])


def test_a_weight_becomes_the_data_of_a_parameter(checkpoint: tuple[str, Any]) -> None:
    reader, weights = reader_of(checkpoint)
    parameter = torch.nn.Parameter(torch.zeros(6, 8, 15), requires_grad=False)
    with reader:
        parameter.data = weights["a"]
    assert type(parameter.data) is torch.Tensor
    assert torch.equal(parameter, WEIGHTS["a"])
