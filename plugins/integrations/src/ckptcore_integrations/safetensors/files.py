"""Opening of safetensors files, and the library's top-level functions."""

from __future__ import annotations

import ctypes
import math
import os
import re
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, Self, get_args

from safetensors import SafetensorError, TensorSpec

from ckptcore import Context
from ckptcore.plain_safetensors import DTYPE_BITS, TensorEntry
from ckptcore_integrations.safetensors.reading import (
    Backend,
    OpenFile,
    TensorBytes,
    TensorReader,
    checked_header,
    save_bytes,
    save_to,
)

_FRAMEWORKS: Final = {
    "pt": "pytorch",
    "torch": "pytorch",
    "pytorch": "pytorch",
    "np": "numpy",
    "numpy": "numpy",
    "jax": "flax",
    "flax": "flax",
}
_OTHER_FRAMEWORKS: Final = ("tf", "tensorflow", "mlx", "paddle")
_DEVICE: Final = re.compile(r"(?a)cpu|mps(:0)?|(cuda|musa|npu|xpu|xla|mlu|hpu)(:\d+)?")


class SafeSlice:
    """A tensor of an open file. Indexing it reads elements."""

    def __init__(self, entry: TensorEntry, reader: TensorReader) -> None:
        self._entry = entry
        self._reader = reader
        self._part: Callable[[Any], Any] | None = None

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor, in elements."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """Return the dtype of the whole tensor as the format names it, such as ``"F32"``."""
        return self._entry.dtype

    def __getitem__(self, index: Any) -> Any:
        if self._part is None:
            self._part = self._reader.slicer(self._entry)
        return self._part(index)


class safe_open:
    """An open safetensors file, whose tensors are read one by one. Thread-safe. See `safetensors.safe_open`."""

    def __init__(
        self,
        filename: str | os.PathLike[str],
        framework: str,
        device: str | int | None = "cpu",
        *,
        backend: Backend = "mmap",
    ) -> None:
        """Open a file and check its whole header.

        Args:
            filename: the file.
            framework: ``"pt"``, ``"np"`` or ``"flax"``, or another name that the library has for one of them.
            device: the device of PyTorch tensors.
            backend: ``"mmap"`` maps the file, ``"pread"`` reads it.

        Raises:
            FileNotFoundError: the file does not exist or cannot be opened.
            SafetensorError: the file is damaged, or an argument is not supported.
        """
        kind = _framework(framework)
        place = _device(device, kind)
        if backend not in get_args(Backend):
            raise SafetensorError(f'backend "{backend}" is invalid (expected one of: "mmap", "pread")')
        file = OpenFile(filename)
        self._entries: Mapping[str, TensorEntry] = file.header.tensors
        self._metadata = file.header.metadata
        self._reader: TensorReader | None = _reader(file, kind, place, backend)

    def keys(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        self._opened()
        return sorted(self._entries)

    def offset_keys(self) -> list[str]:
        """Return the names of all tensors in the order of their bytes."""
        self._opened()
        return list(self._entries)

    def metadata(self) -> dict[str, str] | None:
        """Return the metadata of the header, or None if it has no metadata."""
        self._opened()
        return None if self._metadata is None else dict(self._metadata)

    def get_tensor(self, name: str) -> Any:
        """Return a tensor.

        Raises:
            SafetensorError: the file lacks it, or the framework lacks its dtype.
        """
        return self._opened().whole(self._entry(name))

    def get_tensors(self) -> dict[str, Any]:
        """Return all tensors by name, in the order of their bytes."""
        return self._opened().every()

    def get_slice(self, name: str) -> SafeSlice:
        """Return an object that reads a tensor when it is indexed."""
        reader = self._opened()
        return SafeSlice(self._entry(name), reader)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._reader = None

    def _opened(self) -> TensorReader:
        if self._reader is None:
            raise SafetensorError("File is closed")
        return self._reader

    def _entry(self, name: str) -> TensorEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise SafetensorError(f"File does not contain tensor {name}")
        return entry


class safe_open_handle(safe_open):
    """`safe_open` of a Python file object. Opens the file again by its name."""

    def __init__(self, f: Any, framework: str, device: str | int | None = "cpu", *, backend: Backend = "mmap") -> None:
        _ = f.fileno
        super().__init__(f.name, framework, device, backend=backend)


def _framework(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"framework must be a str; found {name!r}")
    if name in _OTHER_FRAMEWORKS:
        raise SafetensorError(
            f"framework {name} is not supported by ckptcore_integrations.safetensors, only 'pt', 'np' and 'flax'. Use "
            "safetensors.safe_open, which reads the same files"
        )
    if name not in _FRAMEWORKS:
        raise SafetensorError(f"framework {name} is invalid")
    return _FRAMEWORKS[name]


def _device(device: str | int | None, framework: str) -> str | int:
    """Return the device as PyTorch names it. A device without a number gets number 0, as in the library."""
    if device is None:
        return "cpu"
    if isinstance(device, str):
        match = _DEVICE.fullmatch(device)
        if match is None:
            raise SafetensorError(f"device {device} is invalid")
        if match[2] and not match[3]:
            device = f"{device}:0"
    elif not isinstance(device, int) or device < 0:
        raise SafetensorError(f"device {device!r} is invalid")
    if device != "cpu" and framework != "pytorch":
        raise SafetensorError(f"Device {device} is not supported for framework {framework}")
    return device


def _reader(file: OpenFile, framework: str, device: str | int, backend: Backend) -> TensorReader:
    """Return the reader of a framework. Imports only this framework."""
    if framework == "pytorch":
        from ckptcore_integrations.safetensors.torch_tensors import TorchReader

        return TorchReader(file, backend, device)
    from ckptcore_integrations.safetensors.numpy_tensors import FlaxReader, NumpyReader

    return NumpyReader(file, backend) if framework == "numpy" else FlaxReader(file, backend)


def serialize(tensor_dict: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return tensors, given by their addresses, as the bytes of a file. See `safetensors.serialize`."""
    return save_bytes(_from_addresses(tensor_dict), metadata)


def serialize_file(
    tensor_dict: Mapping[str, TensorSpec],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    context: Context | None = None,
) -> None:
    """Save tensors, given by their addresses, atomically in one file. See `safetensors.serialize_file`."""
    save_to(_from_addresses(tensor_dict), filename, metadata, context)


def _from_addresses(specs: Mapping[str, TensorSpec]) -> dict[str, TensorBytes]:
    tensors = {}
    for name, spec in specs.items():
        if not isinstance(spec, TensorSpec):
            raise TypeError(f"expected a TensorSpec for {name!r}; found {type(spec).__name__}")
        shape = tuple(spec.shape)
        if math.prod(shape) * DTYPE_BITS[spec.dtype] != 8 * spec.data_len:
            raise SafetensorError(
                f"Error while serializing: {name!r} has dtype {spec.dtype}, shape {list(shape)} and {spec.data_len} "
                "bytes, which do not agree"
            )
        data = (ctypes.c_ubyte * spec.data_len).from_address(spec.data_ptr) if spec.data_len else b""
        tensors[name] = TensorBytes(spec.dtype, shape, memoryview(data).cast("B"))
    return tensors


def deserialize(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Return the dtype, shape and bytes of each tensor of a file in memory. See `safetensors.deserialize`."""
    return [
        (
            name,
            {"shape": list(entry.shape), "dtype": entry.dtype, "data": bytearray(data[entry.start : entry.stop])},
        )
        for name, entry in checked_header(data).tensors.items()
    ]
