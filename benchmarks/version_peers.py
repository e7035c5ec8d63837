"""Other ways to move versions of weights: slime's encoder, SkyRL's `delta/checkpoint.py`, and whole safetensors files.

slime is in no package. If the environment variable ``CKPTCORE_SLIME`` names a directory with its source, its unmodified
encoder runs. Otherwise its kernel runs, as its documentation describes it: for each tensor XOR, the number of changed
bytes, one frame of zstd level 1 and XXH3-128, in a pool of threads. Its reader is part of SGLang, and its kernel does
the same in reverse, in place.
"""

# mypy: allow-untyped-calls, allow-any-generics

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import os
import shutil
import struct
import sys
import types
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch
import xxhash
import zstandard

from benchmarks.fine_tuned import Weights

SLIME: Final = "slime, its encoder"
SLIME_KERNEL: Final = "slime, its kernel"
COPIED: Final = "slime, its kernel on a copy"
SKYRL: Final = "SkyRL 0.4.0"
FULL: Final = "safetensors, whole"

_SKYRL_MODULE: Final = "skyrl.backends.skyrl_train.weight_sync.delta.checkpoint"
_SOURCE: Final = "CKPTCORE_SLIME"
_WORKERS: Final = min(32, os.cpu_count() or 8)


class Peer(Protocol):
    """A trainer that publishes, and an engine that keeps a local checkpoint, in one process."""

    def publish(self, weights: Weights) -> None:
        """Publish the next version."""

    def nbytes(self) -> int:
        """Return the bytes of the newest version."""

    def prepare(self) -> None:
        """Bring the local checkpoint to the newest version. Verify it as the peer does."""

    def local(self) -> Path:
        """Return the directory of the local checkpoint."""


def peers(base: Path, directory: Path) -> Mapping[str, Peer]:
    """Return the peers that can run, by name.

    Args:
        base: a Hugging Face directory with the version 0.
        directory: for their files.
    """
    made: dict[str, Peer] = {}
    if source := os.environ.get(_SOURCE):
        made[SLIME] = _Slime(base, directory / "slime", Path(source))
    else:
        made[SLIME_KERNEL] = _SlimeKernel(base, directory / "slime")
    made[COPIED] = _Copied(base, directory / "copied")
    if importlib.util.find_spec("skyrl") is None:
        print("versions: SkyRL is not installed; call make bench-versions", file=sys.stderr)
    else:
        made[SKYRL] = _SkyRL(base, directory / "skyrl")
    made[FULL] = _Whole(directory / "whole")
    return made


def size_of(directory: Path) -> int:
    """Return the bytes of the files below a directory."""
    return sum([path.stat().st_size for path in directory.rglob("*") if path.is_file()])


def _seed(base: Path, local: Path) -> None:
    shutil.copytree(base, local)


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.detach().contiguous().view(torch.uint8).reshape(-1).numpy()


class _SlimeKernel:
    """The kernel of slime's encoder and of its reader."""

    def __init__(self, base: Path, directory: Path) -> None:
        self._published = directory / "published"
        self._local = directory / "local"
        _seed(base, self._local)
        self._version = self._applied = 0
        self._base: dict[str, Any] = {
            name: array.copy() for name, array in _raw_tensors(base / "model.safetensors").items()
        }

    def publish(self, weights: Weights) -> None:
        def encode(item: tuple[str, torch.Tensor]) -> tuple[str, Any, bytes, str]:
            name, tensor = item
            new = _bytes_of(tensor).copy()  # as a copy from a GPU
            difference = new ^ self._base[name]
            if not np.count_nonzero(difference):
                return name, new, b"", ""
            frame = zstandard.ZstdCompressor(level=1).compress(difference)
            return name, new, frame, xxhash.xxh3_128(new).hexdigest()

        with ThreadPoolExecutor(_WORKERS) as pool:
            encoded = list(pool.map(encode, weights.items()))
        self._version += 1
        frames = {name: np.frombuffer(frame, np.uint8) for name, _, frame, _ in encoded if frame}
        digests = {name: digest for name, _, frame, digest in encoded if frame}
        self._base.update({name: new for name, new, _, _ in encoded})
        version = self._directory(self._version)
        version.mkdir(parents=True)
        file = "model-00000-of-00001.safetensors"
        _replace(version / file, safetensors.numpy.save(frames, metadata=digests))
        metadata = {
            "version": f"{self._version:06d}",
            "base_version": f"{self._version - 1:06d}",
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
        }
        index = {"metadata": metadata, "weight_map": dict.fromkeys(frames, file)}
        _replace(version / "model.safetensors.index.json", json.dumps(index).encode())

    def nbytes(self) -> int:
        return size_of(self._directory(self._version))

    def prepare(self) -> None:
        (delta,) = self._directory(self._version).glob("*.safetensors")
        content = delta.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        digests = json.loads(content[8 : 8 + length])["__metadata__"]
        frames = _raw_tensors(delta)
        local = _raw_tensors(self._local / "model.safetensors", writable=True)

        def apply(name: str) -> None:
            words, reader = local[name], zstandard.ZstdDecompressor().stream_reader(io.BytesIO(frames[name].tobytes()))
            hasher, position = xxhash.xxh3_128(), 0
            while position < words.size:
                block = np.frombuffer(reader.read(min(2 << 20, words.size - position)), np.uint8)
                part = words[position : position + block.size]
                part ^= block
                hasher.update(part)
                position += block.size
            assert hasher.hexdigest() == digests[name], name

        with ThreadPoolExecutor(_WORKERS) as pool:
            list(pool.map(apply, frames))
        self._applied = self._version
        _replace(self._local / "state.json", json.dumps({"version": self._applied}).encode())

    def local(self) -> Path:
        return self._local

    def _directory(self, version: int) -> Path:
        return self._published / f"weight_v{version:06d}"


class _Copied(_SlimeKernel):
    """The same, but it changes a copy of the local checkpoint, so that the version before stays until a rename."""

    def prepare(self) -> None:
        present, copy = self._local, self._local.with_name("copy")
        _seed(present, copy)
        self._local = copy
        super().prepare()
        old = present.with_name("old")
        present.rename(old)
        self._local = copy.rename(present)
        shutil.rmtree(old)


class _Slime(_SlimeKernel):
    """slime's own class, without a GPU, Ray and Megatron, which its encoder does not use."""

    def __init__(self, base: Path, directory: Path, source: Path) -> None:
        super().__init__(base, directory)
        module = _import_slime(source, directory / "process-group")
        publisher: Any = object.__new__(module.UpdateWeightFromDiskDelta)
        publisher.delta_dir, publisher.delta_encoding = str(self._published), "xor"
        publisher.checksum_algorithm, publisher._is_pp_src_rank = "xxh3-128", True
        publisher.weight_version, publisher._snapshot = 0, self._base
        self._publisher = publisher

    def publish(self, weights: Weights) -> None:
        # Without a GPU, its encoder keeps the memory that it gets.
        self._publisher._iter_hf_tensors = lambda: ((name, tensor.clone()) for name, tensor in weights.items())
        self._version += 1
        self._publisher.weight_version = self._version
        self._publisher._publish()


def _import_slime(source: Path, store: Path) -> Any:
    """Import slime's encoder, with empty modules in place of those that it imports and does not use here."""

    def stub(name: str, **attributes: object) -> types.ModuleType:
        module = sys.modules[name] = types.ModuleType(name)
        module.__dict__.update(attributes)
        module.__path__ = []
        return module

    def load(name: str) -> Any:
        path = source.joinpath(*name.split(".")).with_suffix(".py")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    package = "slime.backends.megatron_utils.update_weight"
    name = f"{package}.update_weight_from_disk_delta"
    if name in sys.modules:
        return sys.modules[name]
    stub("ray")
    stub("ray.actor", ActorHandle=object)
    stub("megatron")
    stub("megatron.core", mpu=None)
    stub("slime")
    stub("slime.backends")
    stub("slime.backends.megatron_utils")
    stub(package)
    stream = types.SimpleNamespace(synchronize=lambda: None)
    accelerator = stub("slime.utils.accelerator", current_device=lambda: "cpu", current_stream=lambda: stream)
    stub("slime.utils", accelerator=accelerator)
    stub("slime.utils.distributed_utils", get_gloo_group=lambda: None)
    stub(f"{package}.update_weight_from_distributed", UpdateWeightFromDistributed=type("Stub", (), {}))
    load("slime.utils.disk_delta")
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    return load(name)


class _SkyRL:
    """The publisher and the store of local checkpoints of SkyRL."""

    def __init__(self, base: Path, directory: Path) -> None:
        module: Any = importlib.import_module(_SKYRL_MODULE)
        self._published = directory / "published"
        self._publisher = module.DeltaCheckpointPublisher(
            base_model_path=str(base),
            sync_dir=str(self._published),
            publish_staging_dir=str(directory / "staging"),
        )
        self._store = module.LocalCheckpointStore(str(base), str(directory / "local"))
        self._version = 0

    def publish(self, weights: Weights) -> None:
        result = self._publisher.create_delta_files(list(weights.items()))
        self._version = self._publisher.publish(result)["version"]

    def nbytes(self) -> int:
        return size_of(self._published / f"delta-{self._version:08d}")

    def prepare(self) -> None:
        self._store.fetch(self._version, sync_dir=str(self._published))
        self._store.validate_ready(self._version)

    def local(self) -> Path:
        return Path(self._store._current_checkpoint_dir())


class _Whole:
    """Each version as a whole file, which is copied to the local disk."""

    def __init__(self, directory: Path) -> None:
        self._published, self._local = directory / "published", directory / "local"
        self._published.mkdir(parents=True)
        self._local.mkdir()

    def publish(self, weights: Weights) -> None:
        _replace(self._published / "model.safetensors", safetensors.torch.save(dict(weights)))

    def nbytes(self) -> int:
        return size_of(self._published)

    def prepare(self) -> None:
        copy = self._local / "model.new"
        shutil.copyfile(self._published / "model.safetensors", copy)
        copy.replace(self._local / "model.safetensors")

    def local(self) -> Path:
        return self._local


def _replace(path: Path, content: bytes) -> None:
    """Replace a file durably, as the encoder of slime does."""
    fresh = path.with_suffix(".tmp")
    with fresh.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _raw_tensors(path: Path, *, writable: bool = False) -> dict[str, Any]:
    """Map a safetensors file, and return the bytes of its tensors."""
    memory: Any = np.memmap(path, np.uint8, "r+" if writable else "r")
    (length,) = struct.unpack("<Q", memory[:8].tobytes())
    header: Mapping[str, Any] = json.loads(memory[8 : 8 + length].tobytes())
    start = 8 + length
    offsets: Mapping[str, Sequence[int]] = {
        name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"
    }
    return {name: memory[start + first : start + last] for name, (first, last) in offsets.items()}
