"""Leaf handlers of dtypes, devices, layouts and memory formats, which are stored as text."""

from __future__ import annotations

from typing import Any, Final

import torch

from ckptcore.handlers import ValueForm, ValueFormHandler
from ckptcore.protocols import LeafHandler


def _named(kind: type, name: Any) -> object:
    """Return the object of a type with a name such as ``torch.float32``.

    Raises:
        TypeError: if PyTorch has none.
    """
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, kind):
        raise TypeError(f"this PyTorch has no {kind.__name__} of that name")
    return found


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
