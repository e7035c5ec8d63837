"""Handlers of sparse and quantized tensors, which are stored as their parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from ckptcore.errors import CorruptCheckpointError, TreeMismatchError, UnsupportedLeafError
from ckptcore.model import PARTS, AbstractArray
from ckptcore.protocols import CheckpointableHandler, Priority
from ckptcore_torch.abstracts import empty_tensor
from ckptcore_torch.conversions import encoding_of
from ckptcore_torch.stored_parts import expect_parts, parse_text, stored_text

_COMPRESSED: Final[Mapping[torch.layout, tuple[str, str]]] = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
"""Names of the index parts of each layout. Methods with the same names return them."""


class SparseHandler(CheckpointableHandler):
    """Handler of sparse tensors of all layouts: their indices and values.

    A load restores the stored number of elements, and whether the tensor is coalesced.
    """

    priority = Priority.FRAMEWORK
    is_object = False

    def flatten(self, value: torch.Tensor) -> dict[str, object]:
        """Return the indices, the values and the text. The tensors share memory with `value`."""
        held = value.detach()
        if held.layout is torch.sparse_coo:
            text = stored_text(str(held.layout), held.shape, coalesced=held.is_coalesced())
            return {"indices": held._indices(), "values": held._values(), PARTS: text}
        parts = {name: getattr(held, name)() for name in _COMPRESSED[held.layout]}
        return {**parts, "values": held.values(), PARTS: stored_text(str(held.layout), held.shape)}

    def flatten_to_load(self, value: torch.Tensor, stored: object) -> object:
        """Return abstract parts with the stored shapes.

        Raises:
            TreeMismatchError: if another layout, shape or dtype is stored.
        """
        own = self.flatten(value)
        given = expect_parts(own[PARTS], stored, may_differ=("coalesced",))
        return {
            name: part if name == PARTS else _abstract_part(name, part, given.get(name)) for name, part in own.items()
        }

    def unflatten(self, like: torch.Tensor, state: Any) -> object:
        """Return a tensor of the same layout and size with the loaded elements."""
        if state["values"] is ...:
            return ...
        try:
            made = _build(like, state)
        except RuntimeError as error:  # a checkpoint may have indices outside of the size
            raise CorruptCheckpointError(
                f"the stored indices and values make up no {like.layout} tensor of the size {tuple(like.shape)}: "
                f"{str(error).splitlines()[0]}"
            ) from error
        if isinstance(like, torch.nn.Parameter):
            return torch.nn.Parameter(made, requires_grad=like.requires_grad)
        return made.requires_grad_() if like.requires_grad else made

    def has_memory(self, target: torch.Tensor) -> bool:
        """Return False for a tensor on the meta device."""
        return not target.is_meta

    def restore(self, target: torch.Tensor, state: Any) -> None:
        """Replace the elements of the tensor itself."""
        made = self.unflatten(target.detach(), state)
        assert isinstance(made, torch.Tensor)  # a target has no placeholders
        with torch.no_grad():
            if target.layout is not torch.sparse_coo and target._nnz() != made._nnz():
                target.resize_as_sparse_(made)
            target.copy_(made)


class QuantizedHandler(CheckpointableHandler):
    """Handler of tensors of ``torch.quantize_per_tensor`` and ``torch.quantize_per_channel``: integers and scales."""

    priority = Priority.FRAMEWORK
    is_object = False

    def flatten(self, value: torch.Tensor) -> dict[str, object]:
        """Return a copy of the integers, and the scales and zero points.

        Raises:
            UnsupportedLeafError: if the dtype packs several elements into a byte.
        """
        held = value.detach()
        if held.dtype not in _INTEGERS:
            raise UnsupportedLeafError(
                f"{held.dtype} has several elements in a byte; save its .dequantize(), or quantize it to torch.qint8"
            )
        kind = str(held.dtype)
        if held.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            text = stored_text(kind, held.shape)
            return {
                "integers": held.int_repr(),
                "scale": held.q_scale(),
                "zero_point": held.q_zero_point(),
                PARTS: text,
            }
        text = stored_text(kind, held.shape, axis=held.q_per_channel_axis())
        scales, zeros = held.q_per_channel_scales(), held.q_per_channel_zero_points()
        return {"integers": held.int_repr(), "scales": scales, "zero_points": zeros, PARTS: text}

    def flatten_to_load(self, value: torch.Tensor, stored: object) -> object:
        """Return the parts of `value`. Raise an error if other parts are stored.

        Raises:
            TreeMismatchError: if another dtype, shape or axis is stored.
        """
        own = self.flatten(value)
        expect_parts(own[PARTS], stored)
        return own

    def unflatten(self, like: torch.Tensor, state: Any) -> object:
        """Return a quantized tensor with the loaded integers and scales."""
        if state["integers"] is ...:
            return ...
        if state["integers"].is_meta:
            return like  # PyTorch has no quantized tensors without elements
        if "scale" in state:
            return torch._make_per_tensor_quantized_tensor(state["integers"], state["scale"], state["zero_point"])
        axis = like.q_per_channel_axis()
        return torch._make_per_channel_quantized_tensor(state["integers"], state["scales"], state["zero_points"], axis)

    def restore(self, target: torch.Tensor, state: Any) -> None:
        """Replace the integers and the scales of the tensor itself."""
        made = self.unflatten(target, state)
        assert isinstance(made, torch.Tensor)  # a target has no placeholders
        with torch.no_grad():
            target.copy_(made)


_SPARSE: Final = SparseHandler()
_QUANTIZED: Final = QuantizedHandler()
_INTEGERS: Final = (torch.qint8, torch.quint8, torch.qint32)


def sparse_or_quantized_handler(leaf: torch.Tensor) -> CheckpointableHandler | None:
    """Return the handler of a tensor that is sparse or quantized, or None for other layouts."""
    if leaf.is_quantized:
        return _QUANTIZED
    return _SPARSE if leaf.layout is torch.sparse_coo or leaf.layout in _COMPRESSED else None


def _build(like: torch.Tensor, state: Mapping[str, Any]) -> torch.Tensor:
    values, size = state["values"], like.shape
    checked = not values.is_meta
    if like.layout is torch.sparse_coo:
        coalesced = parse_text(state[PARTS]).get("coalesced") is True
        return torch.sparse_coo_tensor(state["indices"], values, size, check_invariants=checked, is_coalesced=coalesced)
    compressed, plain = (state[name] for name in _COMPRESSED[like.layout])
    return torch.sparse_compressed_tensor(compressed, plain, values, size, layout=like.layout, check_invariants=checked)


def resize_sparse_buffers(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Resize the sparse buffers of a module to the number of elements in a loaded state.

    PyTorch's `load_state_dict` copies into compressed tensors only as many elements as they have.
    """
    for name, buffer in module.named_buffers(remove_duplicate=False):
        loaded = state.get(name)
        if buffer.layout in _COMPRESSED and isinstance(loaded, torch.Tensor) and buffer._nnz() != loaded._nnz():
            buffer.resize_as_sparse_(loaded)


def _abstract_part(name: str, own: Any, stored: object) -> torch.Tensor:
    """Return the request for a stored part, which may have any number of elements."""
    if not isinstance(stored, AbstractArray) or stored.dtype.name != encoding_of(own.dtype).name:
        description = stored.dtype.name if isinstance(stored, AbstractArray) else "no array"
        difference = f"{name}: {encoding_of(own.dtype).name} is requested, {description} is stored"
        raise TreeMismatchError(f"{difference}: request a tensor of the stored dtype", [difference])
    shape: Sequence[int] = stored.shape
    return empty_tensor(torch.Size(shape), own.dtype, None if own.device.type in ("cpu", "meta") else own.device)
