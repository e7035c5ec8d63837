"""PyTorch tensors as tensors of safetensors files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from safetensors import SafetensorError

from ckptcore.plain_safetensors import DTYPES, TensorEntry
from ckptcore_integrations.safetensors.reading import Backend, OpenFile, TensorBytes, checked_index

_PAIRS: Final = torch.float4_e2m1fn_x2  # one byte has two elements of F4
_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F4": _PAIRS,
    **{stored: getattr(torch, name) for name, stored in DTYPES.items()},
}
_STORED: Final = {dtype: stored for stored, dtype in _DTYPES.items()}


def _tensor_bytes(name: str, tensor: torch.Tensor) -> TensorBytes:
    """Return the bytes of a tensor.

    Raises:
        ValueError: the tensor is not contiguous.
        SafetensorError: the format has no such dtype.
        RuntimeError: the tensor has no elements to copy, such as one on the device ``meta``.
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"cannot save {name!r}: the tensor is not contiguous. If it is a part of another tensor, save that one and "
            "slice it after the load, or call `.contiguous()` first."
        )
    dtype = _STORED.get(tensor.dtype)
    if dtype is None:
        raise SafetensorError(f"Unknown dtype {tensor.dtype} of {name!r}. Supported dtypes: {', '.join(DTYPES)}")
    shape = tuple(tensor.shape)
    if dtype == "F4" and shape:
        shape = (*shape[:-1], 2 * shape[-1])
    if not tensor.numel():
        return TensorBytes(dtype, shape, b"")
    on_host = tensor.detach().to("cpu").resolve_conj().resolve_neg()
    return TensorBytes(dtype, shape, on_host.reshape(-1).view(torch.uint8).numpy().data)


def tensor_of(entry: TensorEntry, data: Any, start: int) -> torch.Tensor:
    """Return a tensor that views the bytes of a writable buffer from a position.

    Raises:
        SafetensorError: PyTorch has no such dtype.
    """
    dtype, shape = _dtype_of(entry), _storage_shape(entry)
    if entry.start == entry.stop:
        return torch.empty(shape, dtype=dtype)
    count = (entry.stop - entry.start) // dtype.itemsize
    return torch.frombuffer(data, dtype=dtype, count=count, offset=start).view(shape)


def _dtype_of(entry: TensorEntry) -> torch.dtype:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise SafetensorError(f"Dtype not understood: {entry.dtype}. PyTorch has no such dtype")
    return dtype


def _storage_shape(entry: TensorEntry) -> tuple[int, ...]:
    """Return the shape of an entry in PyTorch, where one element contains two elements of F4.

    Raises:
        SafetensorError: the last axis of F4 is odd.
    """
    shape = entry.shape
    if entry.dtype != "F4":
        return shape
    if not shape or shape[-1] % 2:
        raise SafetensorError(f"f4_x2 dtype requires that the last dim be divisible by 2 in torch: got {list(shape)}")
    return (*shape[:-1], shape[-1] // 2)


class TorchReader:
    """Reads tensors. With the backend ``"mmap"``, tensors on the CPU are private mappings of the file."""

    def __init__(self, file: OpenFile, backend: Backend, device: str | int) -> None:
        """Read from an open file to a device."""
        self._file = file
        self._device = device
        self._mapping = _map(file) if backend == "mmap" else None

    def whole(self, entry: TensorEntry) -> torch.Tensor:
        """Return a tensor."""
        return self._on_device(self._on_host(entry))

    def every(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name."""
        return {name: self.whole(entry) for name, entry in self._file.header.tensors.items()}

    def slicer(self, entry: TensorEntry) -> Callable[[Any], torch.Tensor]:
        """Return a function that returns the slice for an index. Mapped tensors accept every index of PyTorch."""
        if self._mapping is not None:
            mapped = self._on_host(entry)
            return lambda index: self._on_device(mapped[index])
        shape = _storage_shape(entry)
        return lambda index: self._on_device(self._on_host(entry)[checked_index(index, shape)].clone())

    def _on_host(self, entry: TensorEntry) -> torch.Tensor:
        if self._mapping is not None:
            return tensor_of(entry, self._mapping, entry.start)
        data = torch.empty(entry.stop - entry.start, dtype=torch.uint8, device="cpu").numpy()
        self._file.read_into(entry.start, data.data)
        return tensor_of(entry, data, 0)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._device == "cpu":
            return tensor
        if isinstance(self._device, str) and self._device.startswith("cuda"):
            tensor = tensor.pin_memory()  # copies to a device are faster from pinned memory
        return tensor.to(self._device)


def _map(file: OpenFile) -> Any:
    """Map a file, private and writable, as a buffer.

    Uses PyTorch, because a mapping of the module `mmap` keeps a descriptor open as long as any tensor exists.
    """
    storage: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{file.descriptor}", False, file.nbytes)
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()


def tensors_bytes(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorBytes]:
    """Return the bytes of tensors by name."""
    return {name: _tensor_bytes(name, tensor) for name, tensor in tensors.items()}
