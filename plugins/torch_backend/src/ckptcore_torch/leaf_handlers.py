"""Handlers by type: of tensors, of containers, and of dtypes and devices, which are stored as text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

import torch

from ckptcore.handlers import ValueForm, ValueFormHandler
from ckptcore.protocols import ContainerHandler, Flattened, LeafHandler, Priority
from ckptcore_torch.optimizer_objects import OptimizerObject, OptimizerObjectHandler
from ckptcore_torch.tensors import SubclassHandler, TensorHandler, is_sharded


class _SizeHandler(ContainerHandler):
    priority = Priority.EXACT

    def flatten(self, value: torch.Size) -> Flattened:
        return Flattened("tuple", range(len(value)), tuple(value), "torch.Size")

    def unflatten(self, like: Any, children: Sequence[object]) -> object:
        return torch.Size(children)  # type: ignore[arg-type]  # raises an error for other types itself


_SIZES: Final = _SizeHandler()
_OBJECTS: Final = OptimizerObjectHandler()


def container_handler_of_type(value_type: type) -> ContainerHandler | None:
    """Return the handler of `torch.Size` or `OptimizerObject`, or None for other types."""
    if value_type is torch.Size:
        return _SIZES
    return _OBJECTS if value_type is OptimizerObject else None


def _named(kind: type, name: Any) -> object:
    """Return the object of a type with a name such as ``torch.float32``.

    Raises:
        TypeError: if PyTorch has no such object.
    """
    constant = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(constant, kind):
        raise TypeError(f"this PyTorch has no {kind.__name__} of that name")
    return constant


def _device(kind: type, text: Any) -> object:
    if not isinstance(text, str):
        raise TypeError("it is not text")
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise ValueError(str(error).splitlines()[0]) from error


_HANDLERS: Final = {
    torch.dtype: ValueFormHandler(ValueForm("torch.dtype", str, _named)),
    torch.layout: ValueFormHandler(ValueForm("torch.layout", str, _named)),
    torch.memory_format: ValueFormHandler(ValueForm("torch.memory_format", str, _named)),
    torch.device: ValueFormHandler(ValueForm("torch.device", str, _device)),
}


def value_handler_of_type(leaf_type: type) -> LeafHandler | None:
    """Return the handler for a type, or None for other types."""
    return _HANDLERS.get(leaf_type)


_PLAIN: Final = TensorHandler()
_SUBCLASSES: Final = SubclassHandler()


def leaf_handler_of_type(leaf_type: type) -> LeafHandler | None:
    """Return the handler for a type of tensor or value of PyTorch, or None for other types."""
    if leaf_type is torch.Tensor or leaf_type is torch.nn.Parameter:
        return _PLAIN
    if not issubclass(leaf_type, torch.Tensor):
        return value_handler_of_type(leaf_type)
    # Distributed tensors exist only if their module was imported. Importing it is slow, and some
    # builds of PyTorch lack it.
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and issubclass(leaf_type, distributed.DTensor):
        from ckptcore_torch.dtensors import DTensorHandler

        return DTensorHandler()
    if is_sharded(leaf_type):
        from ckptcore_torch.sharded_tensors import ShardedTensorHandler

        return ShardedTensorHandler()
    return _SUBCLASSES
