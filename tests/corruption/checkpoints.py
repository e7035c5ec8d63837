"""Checkpoints that tests damage, and checks of a damaged checkpoint."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from ckptcore_orbax import OcdbtLayout, Zarr3Layout, ZarrLayout
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.errors import CheckpointError
from ckptcore.io.memory import allocate
from ckptcore.model import ArraySpec, HostArray

FAST: Final = ckptcore.Context(durability="none", io=ckptcore.context.IOOptions(threads=1))
RELAXED: Final = ckptcore.Context(io=ckptcore.context.IOOptions(verify=False, threads=1))
_SLACK_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class Original:
    """A checkpoint with its undamaged state and files.

    Attributes:
        location: the directory of the checkpoint.
        state: the saved state.
        files: the undamaged bytes of each file, by its path in the checkpoint.
    """

    location: Path
    state: Any
    files: Mapping[str, bytes]

    def restore(self) -> None:
        """Undo all damage."""
        shutil.rmtree(self.location, ignore_errors=True)
        for name, content in self.files.items():
            (self.location / name).parent.mkdir(parents=True, exist_ok=True)
            (self.location / name).write_bytes(content)

    def damaged_files(self) -> list[str]:
        """Return the paths of files that are missing or differ from their undamaged bytes."""
        return [
            name
            for name, content in self.files.items()
            if not (self.location / name).is_file() or (self.location / name).read_bytes() != content
        ]

    def check(self) -> None:
        """Assert that loads detect the damage, that `verify` names it, and that no function crashes."""
        damaged = self.damaged_files()
        with bounded_memory(self.location):
            try:
                loaded = ckptcore.load(self.location, context=FAST)
            except CheckpointError:
                assert damaged, "an undamaged checkpoint does not load"
            else:
                assert same_value(loaded, self.state), f"{damaged} are damaged, and another state was loaded"
            with contextlib.suppress(CheckpointError):
                # Without verification a load may return wrong elements, but must not crash.
                ckptcore.load(self.location, context=RELAXED)
            with contextlib.suppress(CheckpointError):
                ckptcore.metadata(self.location)
        report = ckptcore.verify(self.location)
        keys = {problem.key for problem in report.problems}
        assert report.ok == (not damaged)
        # A damaged root does not describe the other files.
        of_root = {name for name in damaged if name.startswith("checkpoint.")}
        if of_root:
            assert keys and keys <= of_root, f"{damaged} are damaged, and verify names {keys}"
        else:
            assert keys == set(damaged), f"{damaged} are damaged, and verify names {keys}"


@contextlib.contextmanager
def bounded_memory(location: Path) -> Iterator[None]:
    """Fail if two loads in this block allocate more bytes for arrays than twice the size of the files."""
    held = sum(path.stat().st_size for path in location.rglob("*") if path.is_file() and not path.is_symlink())

    def bounded(spec: ArraySpec) -> HostArray:
        nonlocal held
        held -= spec.nbytes
        assert held + _SLACK_BYTES >= 0, f"{spec} is more than the files hold"
        return allocate(spec)

    with pytest.MonkeyPatch.context() as patch:
        # `check` loads twice in this block.
        held *= 2
        patch.setattr("ckptcore.loading.reading.allocate", bounded)
        yield


def _arrays(count: int, elements: int) -> dict[str, Any]:
    random = np.random.default_rng(count)
    return {
        "arrays": [random.integers(0, 255, elements + number, np.uint8) for number in range(count)],
        "floats": {"weight": random.standard_normal((3, 5)), "half": random.standard_normal(7).astype(np.float16)},
        "empty": np.zeros((0, 3), np.int32),
        "step": 123456789,
        "name": "a name",
        "text": "ä" * 9000,
        "nothing": None,
    }


def _save_one_file(location: Path) -> Any:
    state = _arrays(3, 100)
    ckptcore.save(location, state, context=FAST)
    return state


def _save_several_files(location: Path) -> Any:
    state = _arrays(4, 3000)
    ckptcore.save(location, state, layout=SafetensorsLayout(max_file_bytes=4000), context=FAST)
    return state


def _save_with_parts(location: Path) -> Any:
    """Save each table of the root in its own object, as in a checkpoint of very many arrays."""
    state = _arrays(5, 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptcore.commit.root_json._INLINE_BYTES", 0)
        ckptcore.save(location, state, metadata={"loss": [0.5, 0.25]}, context=FAST)
    return state


def _save_several_blocks(location: Path) -> Any:
    state = _arrays(2, 1_300_000)
    ckptcore.save(location, state, context=FAST)
    return state


def _save_database(location: Path) -> Any:
    """Save checksummed chunks in several data files, with a database of their offsets."""
    state = _arrays(3, 300)
    ckptcore.save(location, state, layout=OcdbtLayout(chunk_bytes=64, data_file_bytes=512), context=FAST)
    return state


def _save_compressed_database(location: Path) -> Any:
    state = _arrays(3, 300)
    ckptcore.save(location, state, layout=OcdbtLayout(chunk_bytes=128, compression="zstd"), context=FAST)
    return state


def _save_zarr3(location: Path) -> Any:
    state = _arrays(2, 100)
    ckptcore.save(location, state, layout=Zarr3Layout(chunk_bytes=64), context=FAST)
    return state


def _save_zarr(location: Path) -> Any:
    state = _arrays(1, 100)
    ckptcore.save(location, state, layout=ZarrLayout(compression="blosc"), context=FAST)
    return state


ORIGINALS: Final[Mapping[str, Callable[[Path], Any]]] = {
    "one file": _save_one_file,
    "several files": _save_several_files,
    "parts of the root": _save_with_parts,
    "several blocks": _save_several_blocks,
    "database": _save_database,
    "compressed database": _save_compressed_database,
    "zarr3": _save_zarr3,
    "zarr": _save_zarr,
}
"""By name, a function that saves a checkpoint and returns its state."""


def make_original(name: str, directory: Path) -> Original:
    """Save the checkpoint with a name of `ORIGINALS`."""
    location = directory / "step_1"
    state = ORIGINALS[name](location)
    paths = [path for path in sorted(location.rglob("*")) if path.is_file()]
    files = {path.relative_to(location).as_posix(): path.read_bytes() for path in paths}
    original = Original(location, state, files)
    assert ("checkpoint.json" in files) and (len(files) > 2) == (name not in ("one file", "several blocks"))
    original.check()
    return original
