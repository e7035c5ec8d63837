"""Handler of tensor subclasses that are composed of other tensors, also inside DTensors.

Such a tensor is stored as a text and its inner tensors, whose names come from
``__tensor_flatten__``. A load takes the class and the context from the caller's tensor. This class
builds the result with ``__tensor_unflatten__``.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from ckptcore.errors import TreeMismatchError
from ckptcore.model import JSON, PARTS, AbstractArray
from ckptcore.protocols import CheckpointableHandler, Priority
from ckptcore_torch.conversions import encoding_of
from ckptcore_torch.stored_parts import expect_parts, flat_shape, stored_text

if TYPE_CHECKING:
    from ckptcore_torch.sharded_parts import ShardedParts


_FLAT: Final[Mapping[str, Sequence[str]]] = {
    "OptimState8bit": ("scale",),
    "OptimState4bit": ("codes", "scale"),
    "OptimStateFp8": ("scale",),
}
"""Flat parts of the classes of torchao.optim.

Each element of such a part belongs to a run of elements of the tensor in row-major order.
"""


class SubclassPartsHandler(CheckpointableHandler):
    """Handler of tensors whose class has ``__tensor_flatten__`` and ``__tensor_unflatten__``."""

    priority = Priority.FRAMEWORK
    is_object = False

    def flatten(self, value: torch.Tensor) -> dict[str, object]:
        """Return the inner tensors, which share memory with `value`, and the text.

        Raises:
            UnsupportedLeafError: if the shards of a DTensor cannot be stored as parts of one array.
        """
        inner, sharded = inner_tensor(value), _sharded(value)
        flat = _flat_parts(inner)
        parts: dict[str, object] = {}
        tiled: Sequence[int] = ()
        for name in _names(inner):
            part = getattr(inner, name)
            if sharded is not None:
                parts[name], tiles = sharded.stored(name, part, is_flat=name in flat)
                tiled = tiles or tiled
            elif name in flat:
                shape = flat_shape(tuple(inner.shape), inner.numel() // part.numel())
                parts[name] = part if shape is None else part.view(shape)
            else:
                parts[name] = part
        shards: dict[str, JSON] = {"shards": list(tiled)} if tiled else {}
        return {**parts, PARTS: stored_text(type(inner).__qualname__, value.shape, context=_context(inner), **shards)}

    def flatten_to_load(self, value: torch.Tensor, stored: object) -> object:
        """Return the parts of `value`.

        Raises:
            TreeMismatchError: if other parts are stored, or if the class, shape or context differs.
        """
        own = self.flatten(value)
        given = expect_parts(own[PARTS], stored)
        for name, part in own.items():
            held, its = given.get(name), part
            if isinstance(held, AbstractArray) and isinstance(its, torch.Tensor) and not is_composed(inner_tensor(its)):
                _expect_form(name, its, held)
        return own

    def unflatten(self, like: torch.Tensor, state: Any) -> object:
        """Return `like` itself if the state has its own parts, otherwise a tensor of its class with other parts.

        Parts that are not loaded are placeholders. If all parts are placeholders, the result is a
        placeholder. If only some are, the result is the state, a dict.
        """
        inner = inner_tensor(like)
        names, context = inner.__tensor_flatten__()  # type: ignore[attr-defined]  # `is_composed` has checked it
        loaded = {name: state[name] for name in names}
        absent = [name for name, part in loaded.items() if part is ...]
        if absent:
            return ... if len(absent) == len(loaded) else state
        own = {name: getattr(inner, name) for name in names}
        if all(share_parts(part, inner_tensor(loaded[name])) for name, part in own.items()):
            return like
        parts = {name: _in_shape_of(own[name], part) for name, part in loaded.items()}
        made: torch.Tensor = type(inner).__tensor_unflatten__(parts, context, inner.size(), inner.stride())  # type: ignore[attr-defined]
        if inner is not like:
            from ckptcore_torch.sharded_parts import around  # see `_sharded`

            made = around(like, made)
        if isinstance(like, torch.nn.Parameter):
            return torch.nn.Parameter(made, requires_grad=like.requires_grad)
        return made.requires_grad_() if like.requires_grad else made

    def has_memory(self, target: torch.Tensor) -> bool:
        """Return False for a tensor with a part on the meta device."""
        inner = inner_tensor(target)
        return not any(getattr(inner, name).is_meta for name in _names(inner))

    def restore(self, target: torch.Tensor, state: Any) -> None:
        """Copy the parts that could not be filled in place, such as parts that are not contiguous."""
        inner = inner_tensor(target)
        for name in _names(inner):
            own, loaded = getattr(inner, name), state[name]
            if share_parts(own, inner_tensor(loaded)):
                continue
            with torch.no_grad():
                own.copy_(_in_shape_of(own, loaded))


def is_composed(leaf: torch.Tensor) -> bool:
    """Return True for a tensor of a subclass that consists of other tensors."""
    kind = type(leaf)
    if kind is torch.Tensor or kind is torch.nn.Parameter or not hasattr(kind, "__tensor_unflatten__"):
        return False
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(leaf, distributed.DTensor):
        return False
    return not leaf.is_nested and kind.__name__ != "AsyncCollectiveTensor"  # the latter becomes one array


def inner_tensor(leaf: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, and any other tensor itself."""
    local: torch.Tensor | None = getattr(leaf, "_local_tensor", None)
    return leaf if local is None else local


def _expect_form(name: str, own: torch.Tensor, stored: AbstractArray) -> None:
    """Raise an error for a part of another shape or dtype. No option of a load may pad, cut or cast parts."""
    encoding = encoding_of(own.dtype)
    if tuple(own.shape) != stored.shape or encoding.name != stored.dtype.name:
        difference = (
            f"{name}: {encoding.name}{list(own.shape)} is requested, {stored.dtype.name}{list(stored.shape)} is stored"
        )
        raise TreeMismatchError(
            f"{difference}: create the tensor with the block size and options with which it was saved", [difference]
        )


def _in_shape_of(own: torch.Tensor, loaded: torch.Tensor) -> torch.Tensor:
    """Return this process's elements of a loaded part, in the shape of the inner tensor."""
    local = inner_tensor(loaded)
    return local if local.shape == own.shape else local.view(own.shape)


def share_parts(own: torch.Tensor, loaded: torch.Tensor) -> bool:
    """Return True if two tensors share the same memory. Composed tensors do so if all their parts do."""
    if own is loaded:
        return True
    if is_composed(own) or is_composed(loaded):
        if type(own) is not type(loaded):
            return False
        return all(share_parts(getattr(own, name), getattr(loaded, name)) for name in _names(own))
    if own.is_meta or loaded.is_meta or own.dtype != loaded.dtype or own.numel() != loaded.numel():
        return False
    return own.data_ptr() == loaded.data_ptr() and own.is_contiguous() and loaded.is_contiguous()


def _names(inner: torch.Tensor) -> Sequence[str]:
    names: Sequence[str] = inner.__tensor_flatten__()[0]  # type: ignore[attr-defined]  # `is_composed` has checked it
    return names


def _sharded(leaf: torch.Tensor) -> ShardedParts | None:
    if inner_tensor(leaf) is leaf:
        return None
    from ckptcore_torch.sharded_parts import ShardedParts  # only DTensors need it, and its imports are slow

    return ShardedParts(leaf)


def _flat_parts(inner: torch.Tensor) -> Sequence[str]:
    kind = type(inner)
    return _FLAT.get(kind.__name__, ()) if kind.__module__.startswith("torchao.") else ()


def _context(inner: torch.Tensor) -> JSON:
    """Return the static content of a tensor as JSON. Its own shape, dtype and device are left to the caller."""
    return _as_json(inner.__tensor_flatten__()[1], inner)  # type: ignore[attr-defined]  # `is_composed` has checked it


def _as_json(value: Any, inner: torch.Tensor) -> JSON:
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, torch.dtype):
        return "<dtype>" if value == inner.dtype else str(value)
    if isinstance(value, torch.device):
        return "<device>"
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, tuple) and value == tuple(inner.shape):
        return "<shape>"
    if isinstance(value, list | tuple):
        return [_as_json(child, inner) for child in value]
    if isinstance(value, Mapping):
        return {str(key): _as_json(child, inner) for key, child in value.items()}
    kind = type(value).__qualname__
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _as_json(getattr(value, field.name), inner) for field in dataclasses.fields(value)}
        return {"type": kind, **fields}
    return {"type": kind}
