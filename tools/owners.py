"""Read checkpoints with the libraries that own their formats, without running code from the files.

Pickles are read by PyTorch with ``weights_only``, or by `Unpickler` here, which knows a few classes of data.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import io
import json
import pickle
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ckptcore.results import CheckpointMetadata

_ZIP: Final = b"PK\x03\x04"
_HEAD_BYTES: Final = 512


class NotReadError(Exception):
    """No library that owns the format reads the checkpoint here without running code. The text is the reason."""


def read_as_owner(path: Path, metadata: CheckpointMetadata) -> tuple[str, Any]:
    """Return the name of the owner's library, and the tree that it reads.

    Raises:
        NotReadError: no library reads it, or the library that owns the format fails.
    """
    if metadata.save_id is not None:
        raise NotReadError("ckptcore wrote it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for reader in _DIRECTORY_READERS if path.is_dir() else _FILE_READERS:
            try:
                value = reader(path, metadata)
            except NotReadError:
                raise
            except ImportError as error:
                raise NotReadError(f"{error.name} is not installed") from error
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # readers raise anything; torch's CheckpointException is no Exception
                raise NotReadError(f"{reader.__name__[6:]}: {type(error).__name__}: {error}") from error
            if value is not None:
                return value
    raise NotReadError("no reader of an owner")


# --- files


def _read_safetensors(path: Path, metadata: CheckpointMetadata) -> tuple[str, Any] | None:
    if path.suffix != ".safetensors" and metadata.layout != "safetensors":
        return None
    if path.name.endswith(".json"):
        return "safetensors", _safetensors_of(path, path.parent)
    return "safetensors", _safetensors(path)


def _safetensors(path: Path) -> dict[str, Any]:
    for module in ("safetensors.torch", "safetensors.numpy"):
        with contextlib.suppress(ImportError):
            tensors: dict[str, Any] = importlib.import_module(module).load_file(path)
            return tensors
    raise NotReadError("safetensors is not installed")


def _safetensors_of(index: Path, directory: Path) -> dict[str, Any]:
    by_file: dict[str, list[str]] = {}
    for name, file in json.loads(index.read_text())["weight_map"].items():
        by_file.setdefault(file, []).append(name)
    tensors: dict[str, Any] = {}
    for file, names in by_file.items():
        read = _safetensors(directory / file)
        tensors.update({name: read[name] for name in names})
    return tensors


def _read_torch(path: Path, metadata: CheckpointMetadata) -> tuple[str, Any] | None:
    if metadata.layout != "torch":
        return None
    if "TorchScript" in metadata.writer or "export" in metadata.writer:
        raise NotReadError("PyTorch loads a program by running it")
    return "torch", _torch_load(path)


def _torch_load(file: Any) -> Any:
    import torch

    with torch.serialization.safe_globals(_allowed()):
        return torch.load(file, map_location="cpu", weights_only=True)


def _allowed() -> list[Any]:
    """Return the classes of data that `torch.load` accepts here besides its own."""
    import numpy.dtypes

    multiarray = importlib.import_module("numpy._core.multiarray")
    reconstruct, scalar = multiarray._reconstruct, multiarray.scalar
    allowed: list[Any] = [np.ndarray, np.dtype, argparse.Namespace, collections.defaultdict, collections.deque, dict]
    allowed += [collections.Counter, collections.OrderedDict]
    allowed += [reconstruct, scalar, (reconstruct, "numpy.core.multiarray._reconstruct")]
    allowed += [(scalar, "numpy.core.multiarray.scalar"), set, frozenset, bytearray, complex, slice, list, tuple, int]
    return allowed + [kind for kind in vars(numpy.dtypes).values() if isinstance(kind, type)]


def _read_numpy(path: Path, metadata: CheckpointMetadata) -> tuple[str, Any] | None:
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith(b"\x93NUMPY"):
        return "numpy", np.load(path, allow_pickle=False)
    if head.startswith(_ZIP) and path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as archive:
            return "numpy", {name: archive[name] for name in archive.files}
    return None


def _read_hdf5(path: Path, metadata: CheckpointMetadata) -> tuple[str, Any] | None:
    with open(path, "rb") as file:
        if file.read(8) != b"\x89HDF\r\n\x1a\n":
            return None
    h5py = importlib.import_module("h5py")
    with h5py.File(path) as root:
        return "h5py", _hdf5_group(root)


def _hdf5_group(group: Any) -> dict[str, Any]:
    return {name: _hdf5_group(part) if hasattr(part, "keys") else part[()] for name, part in group.items()}


def _read_msgpack(path: Path, metadata: CheckpointMetadata) -> tuple[str, Any] | None:
    if "msgpack" not in metadata.writer:
        return None
    from flax.serialization import msgpack_restore

    state = msgpack_restore(path.read_bytes())
    if b"//GDAPlaceholder" in path.read_bytes():
        raise NotReadError("Flax stored some arrays in another directory")
    return "flax", state


class Unpickler(pickle.Unpickler):
    """Reads pickles of data. Refuses all classes and functions but a few of Python and NumPy."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a known class or function."""
        if module.startswith(("numpy.core", "numpy._core")) and name in ("_reconstruct", "scalar", "_frombuffer"):
            return getattr(importlib.import_module(module.replace("numpy.core", "numpy._core")), name)
        if (module, name) in _PICKLED:
            return getattr(importlib.import_module(module.replace("__builtin__", "builtins")), name)
        raise NotReadError(f"the pickle names {module}.{name}")


_BUILTINS: Final = ("set", "frozenset", "complex", "bytearray")
_PICKLED: Final = frozenset(
    [
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("collections", "OrderedDict"),
        ("collections", "deque"),
        ("argparse", "Namespace"),
        ("_codecs", "encode"),
        *[
            (module, name)
            for module in ("builtins", "__builtin__")
            for name in ("set", "frozenset", "complex", "bytearray")
        ],
    ]
)


def _read_pickle(path: Path, metadata: CheckpointMetadata) -> tuple[str, Any] | None:
    with open(path, "rb") as file:
        if file.read(1) != b"\x80" or metadata.layout == "torch":
            return None
        file.seek(0)
        return "pickle", Unpickler(file).load()


# --- directories


def _read_transformers(path: Path, metadata: CheckpointMetadata) -> tuple[str, Any] | None:
    if metadata.is_composite:
        return None
    for stem in ("model", "diffusion_pytorch_model", "adapter_model"):
        if (path / f"{stem}.safetensors.index.json").exists() and metadata.layout == "safetensors":
            return "safetensors", _safetensors_of(path / f"{stem}.safetensors.index.json", path)
        if (path / f"{stem}.safetensors").exists() and metadata.layout == "safetensors":
            return "safetensors", _safetensors(path / f"{stem}.safetensors")
    files = list(path.glob("*.safetensors"))
    if metadata.layout == "safetensors" and len(files) == 1:
        return "safetensors", _safetensors(files[0])
    indexes, files = list(path.glob("*.bin.index.json")), list(path.glob("*.bin"))
    if metadata.layout == "torch" and len(indexes) == 1:
        return "torch", _torch_of(indexes[0], path)
    for stem in ("pytorch_model", "diffusion_pytorch_model", "adapter_model"):
        if metadata.layout == "torch" and path / f"{stem}.bin" in files:
            return "torch", _torch_load(path / f"{stem}.bin")
    return None


def _torch_of(index: Path, directory: Path) -> dict[str, Any]:
    names = json.loads(index.read_text())["weight_map"]
    read = {file: _torch_load(directory / file) for file in set(names.values())}
    return {name: read[file][name] for name, file in names.items()}


def _read_dcp(path: Path, metadata: CheckpointMetadata) -> tuple[str, Any] | None:
    if not (path / ".metadata").exists():
        return None
    if (path / "common.pt").exists():
        raise NotReadError("Megatron reads common.pt by running it")
    _expect_classes((path / ".metadata").read_bytes())
    from torch.distributed.checkpoint._traverse import set_element
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    class Planner(_EmptyStateDictLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            name = read_item.dest_index.fqn
            set_element(self.original_state_dict, self.mappings[name], _torch_load(value))

    state: dict[str, Any] = {}
    planner: Any = Planner
    _load_state_dict(state, storage_reader=FileSystemReader(path), planner=planner(), no_dist=True)
    return "torch.distributed.checkpoint", state


_DCP: Final = frozenset(
    [
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
    ]
)
"""Classes and functions of other modules that the metadata may name."""


def _expect_classes(data: bytes) -> None:
    """Refuse a pickle that names anything but `_DCP`, dtypes, and content of torch.distributed.checkpoint.

    Raises:
        NotReadError
    """

    class Names(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            import torch

            is_known = module.startswith("torch.distributed.checkpoint.") or (module, name) in _DCP
            if not is_known and not (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
                raise NotReadError(f".metadata names {module}.{name}")
            return getattr(importlib.import_module(module), name)

    Names(io.BytesIO(data)).load()


def _read_orbax(path: Path, metadata: CheckpointMetadata) -> tuple[str, Any] | None:
    if metadata.is_composite:
        items = {name: _orbax_item(path / name) for name in metadata.checkpointables}
        trees = {name: item for name, item in items.items() if item is not None}
        return ("orbax", trees) if trees else None
    names = ["", "state", "default", *(child.name for child in path.iterdir() if child.is_dir())]
    for name in names:
        if (tree := _orbax_item(path / name, json_too="JSON" in metadata.writer)) is not None:
            return "orbax", tree
    return None


def _orbax_item(path: Path, *, json_too: bool = True) -> Any:
    """Return the tree in a directory of Orbax, or the value of its JSON file; None for other directories."""
    if (path / "_METADATA").exists() and not (path / "checkpoint").exists():
        ocp = importlib.import_module("orbax.checkpoint")
        return ocp.PyTreeCheckpointer().restore(str(path.resolve()))
    if (path / "checkpoint").is_file():
        from flax.serialization import msgpack_restore

        if b"PLACEHOLDER://" in (path / "checkpoint").read_bytes():
            raise NotReadError("some arrays are in other files")
        return msgpack_restore((path / "checkpoint").read_bytes())
    file = path / "metadata"
    return json.loads(file.read_bytes()) if json_too and file.is_file() else None


Reader = Callable[[Path, CheckpointMetadata], tuple[str, Any] | None]
_FILE_READERS: Final[Sequence[Reader]] = (
    _read_torch,
    _read_safetensors,
    _read_numpy,
    _read_hdf5,
    _read_msgpack,
    _read_pickle,
)
_DIRECTORY_READERS: Final[Sequence[Reader]] = (_read_transformers, _read_dcp, _read_orbax)
