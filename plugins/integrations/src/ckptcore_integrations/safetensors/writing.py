"""Writing of safetensors files and bytes, for all frameworks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from safetensors import SafetensorError

from ckptcore import Context
from ckptcore.errors import CheckpointError
from ckptcore.plain_safetensors import encode_header, replace_file
from ckptcore.protocols import Buffer


class TensorBytes(NamedTuple):
    """A tensor to write.

    Attributes:
        dtype: the name of its dtype in the format, such as ``"F32"``.
        shape: elements along each axis.
        data: its bytes, little endian, in C order.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Buffer


def save_bytes(tensors: Mapping[str, TensorBytes], metadata: Mapping[str, str] | None) -> bytes:
    """Return the bytes of a file.

    Raises:
        SafetensorError: the format has no such tensors.
        TypeError: a name or the metadata is not a str.
    """
    return b"".join(_pieces(tensors, metadata))


def save_to(
    tensors: Mapping[str, TensorBytes],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None,
    context: Context | None,
) -> None:
    """Write a file atomically. See `ckptcore.plain_safetensors.replace_file`.

    Raises:
        SafetensorError: the format has no such tensors, or the file cannot be written.
        TypeError: a name or the metadata is not a str.
    """
    pieces = _pieces(tensors, metadata)
    try:
        replace_file(filename, pieces, context=context)
    except CheckpointError as error:
        raise SafetensorError(f"Error while serializing: {error}") from error


def _pieces(tensors: Mapping[str, TensorBytes], metadata: Mapping[str, str] | None) -> list[Buffer]:
    try:
        header, names = encode_header({name: tensor[:2] for name, tensor in tensors.items()}, metadata)
    except ValueError as error:
        raise SafetensorError(f"Error while serializing: {error}") from error
    return [header, *[tensors[name].data for name in names]]
