"""Locations with the names of files: a checkpoint is a directory, which other libraries would take for such a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from ckptcore.commit.location import AnyLocation, IndirectLocation, SubPath, shown_location
from ckptcore.errors import InvalidLocationError

SAFETENSORS: Final = ".safetensors"

_WRITERS: Final[Mapping[str, str]] = {
    SAFETENSORS: "safetensors.torch.save_file or safetensors.numpy.save_file",
    ".pt": "torch.save",
    ".pth": "torch.save",
    ".bin": "torch.save",
    ".ckpt": "torch.save, or the trainer",
    ".pkl": "pickle.dump",
    ".npy": "numpy.save",
    ".npz": "numpy.savez",
    ".h5": "h5py",
    ".hdf5": "h5py",
    ".keras": "keras.Model.save",
    ".msgpack": "flax.serialization.msgpack_serialize",
    ".gguf": "gguf.GGUFWriter",
    ".onnx": "torch.onnx.export",
}
"""Functions that write files of these names."""


def file_suffix(location: AnyLocation) -> str:
    """Return the suffix of a location that other libraries take for a file; empty for the name of a directory.

    A location that ends in ``/`` is a directory, whatever its name.
    """
    if isinstance(location, SubPath | IndirectLocation):
        return ""  # a step of a run
    try:
        text = os.fspath(location)
    except TypeError:
        return ""  # refused where it is resolved
    suffix = os.path.splitext(text)[1].lower() if isinstance(text, str) else ""
    # A location in an archive is refused as such.
    return suffix if suffix in _WRITERS and "!/" not in text else ""


def is_safetensors_file(location: AnyLocation) -> bool:
    """Return True for the location of one file of safetensors."""
    return file_suffix(location) == SAFETENSORS


def expect_directory_name(location: AnyLocation) -> None:
    """Refuse the name of a file for a directory that is written.

    Raises:
        InvalidLocationError
    """
    if suffix := file_suffix(location):
        reason = f"a checkpoint is a directory, and other libraries would take a name with {suffix} for a file"
        raise refuse_file_name(location, reason)


def refuse_file_name(location: AnyLocation, reason: str) -> InvalidLocationError:
    """Return the error for a location with the name of a file, with the ways on."""
    shown, suffix = shown_location(location), file_suffix(location)
    return InvalidLocationError(
        f"cannot save to {shown}: {reason}. Save to a directory, such as {shown[: -len(suffix)]!r}, or write the file "
        f"with {_WRITERS[suffix]}. To name a directory like a file all the same, pass text that ends in '/', such "
        f"as {shown.rstrip('/') + '/'!r}; a path of pathlib loses the '/'. Nothing was written"
    )
