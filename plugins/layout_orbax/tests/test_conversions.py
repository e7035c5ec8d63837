"""Conversions between all layouts, of all kinds of leaves and of golden checkpoints, and on several storages."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ckptcore_orbax import OcdbtLayout, Zarr3Layout, ZarrLayout
from ckptcore_testing import DTYPE_NAMES, SHAPES, FaultPlan, assert_same_tree, bit_patterns, with_faults
from jax.sharding import NamedSharding, PartitionSpec

import ckptcore
from ckptcore.errors import CompositeCheckpointError
from ckptcore.hookspecs import hookimpl
from ckptcore.model import ArraySpec
from ckptcore.plugins import installed_plugins
from ckptcore.protocols import Layout, StorageBackend, StorageOpener, StorageOptions

_GOLDEN: Final = Path(__file__).parent / "golden"
_EXPECTED: Final = {path.stem: json.loads(path.read_text()) for path in sorted(_GOLDEN.glob("*.json"))}
_LAYOUTS: Final[Mapping[str, str | Layout]] = {
    "safetensors": "safetensors",
    "zarr": "zarr",
    "zarr3": "zarr3",
    "ocdbt": "ocdbt",
    "ocdbt-zstd": OcdbtLayout(compression="zstd", chunk_bytes=64),
    "ocdbt-pieces": OcdbtLayout(chunk_bytes=16, zarr_format=2, item=""),
    "zarr3-blosc": Zarr3Layout(compression="blosc"),
    "zarr-gzip": ZarrLayout(compression="gzip", chunk_bytes=256),
}
_FEW: Final = ("safetensors", "zarr", "zarr3", "ocdbt", "ocdbt-zstd")
_FAST: Final = ckptcore.Context(durability="none", io=ckptcore.context.IOOptions(threads=2))


class _Pair(NamedTuple):
    first: Any
    second: Any


def _state() -> dict[str, Any]:
    tied = bit_patterns(ArraySpec((13, 7), "bfloat16"), 5)
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    spec: Any = PartitionSpec  # JAX has no types for its constructor
    sharded = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, spec("x", "y")))
    keys = jax.random.split(jax.random.key(1, impl="rbg"), 3)
    return {
        "dtypes": {name: bit_patterns(ArraySpec((3, 5), name)) for name in DTYPE_NAMES},
        "shapes": [bit_patterns(ArraySpec(shape, "float32")) for shape in SHAPES],
        "tied": [tied, {"again": tied}],
        "jax": {"sharded": sharded, "key": jax.random.key(7), "keys": keys},
        "values": (None, True, -1, 10**30, 1.5, float("nan"), 2j, "text", b"\0bytes", np.float16(3)),
        "containers": _Pair([], {"a.b": np.int8(1), "a": {"b": {}, 3: ()}}),
        "long": "x" * 20_000,
    }


class _Files:
    """An object that writes its own files."""

    def save(self, directory: Path) -> Callable[[], None]:
        (directory / "below").mkdir()
        (directory / "below" / "file").write_bytes(b"content" * 100)
        return lambda: None

    def load(self, directory: Path) -> None:
        raise NotImplementedError


def _stored(location: str) -> Any:
    """Return the stored tree: the structure, the records of leaves, ties, and the user's metadata."""
    metadata = ckptcore.metadata(location, context=_FAST)
    return metadata.tree.skeleton, metadata.tree.leaves, metadata.tree.aliases, metadata.custom


def _assert_same(converted: str, original: str) -> None:
    assert ckptcore.verify(converted, context=_FAST).ok
    assert repr(_stored(converted)) == repr(_stored(original))  # by text, because NaN does not equal itself
    assert_same_tree(ckptcore.load(converted, context=_FAST), ckptcore.load(original, context=_FAST))


# --- between layouts --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Locations on disk where the same state is saved in every layout."""
    directory = tmp_path_factory.mktemp("originals")
    for name, layout in _LAYOUTS.items():
        ckptcore.save(directory / name, _state(), layout=layout, metadata={"run": [1, None]}, context=_FAST)
    return {name: str(directory / name) for name in _LAYOUTS}


def test_all_layouts_store_the_same_tree(originals: Mapping[str, str]) -> None:
    """Compares records, notes about shardings and random keys, ties, and elements."""
    for name in _LAYOUTS:
        _assert_same(originals[name], originals["safetensors"])


@pytest.mark.parametrize(
    ("source", "target"),
    [
        *itertools.combinations(_LAYOUTS, 2),  # each test converts in both directions
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in itertools.combinations(reversed(_LAYOUTS), 2)),
    ],
)
def test_a_tree_converts_into_memory_and_back(
    source: str, target: str, originals: Mapping[str, str], tmp_path: Path
) -> None:
    there, back = f"memory://{uuid.uuid4().hex}/checkpoint", str(tmp_path / "back")
    ckptcore.copy(originals[source], there, layout=_LAYOUTS[target], context=_FAST)
    _assert_same(there, originals[source])
    assert ckptcore.metadata(there).layout == target.partition("-")[0]
    ckptcore.copy(there, back, layout=_LAYOUTS[source], context=_FAST)
    _assert_same(back, originals[source])
    ckptcore.delete(there)


@pytest.mark.parametrize("target", _FEW)
@pytest.mark.parametrize("source", _FEW)
def test_several_checkpointables_convert_to_every_layout(source: str, target: str, tmp_path: Path) -> None:
    original, there = f"memory://{uuid.uuid4().hex}/checkpoint", str(tmp_path / "there")
    tied = np.arange(50, dtype=np.int16)
    objects = {
        "state": {"w": tied, "again": tied, "step": 3},
        "moments": [bit_patterns(ArraySpec((9, 9), "float8_e5m2")), "text"],
        "metrics": {"loss": 0.5},
        "own": _Files(),
    }
    ckptcore.save_checkpointables(original, objects, layout=_LAYOUTS[source], metadata={"run": 1}, context=_FAST)
    ckptcore.copy(original, there, layout=_LAYOUTS[target], context=_FAST)
    assert ckptcore.verify(there).ok
    loaded = ckptcore.load_checkpointables(there)
    assert_same_tree(loaded, ckptcore.load_checkpointables(original))
    assert loaded["own"] == {"below/file": b"content" * 100}
    assert ckptcore.metadata(there).custom == {"run": 1}
    ckptcore.delete(original)


# --- from Orbax -------------------------------------------------------------------------------------------------------


def _golden(name: str) -> Path:
    expected = _EXPECTED[name]
    location: Path = _GOLDEN / name / expected.get("directory", expected.get("file", ""))
    return location


def _load(location: Any, context: ckptcore.Context = _FAST) -> Any:
    """Load the tree, or the checkpointables if there is no default tree."""
    try:
        return ckptcore.load(location, context=context)
    except CompositeCheckpointError:
        return ckptcore.load_checkpointables(location, context=context)


@pytest.mark.parametrize("target", _FEW)
@pytest.mark.parametrize("name", _EXPECTED)
def test_checkpoints_of_orbax_convert_to_every_layout(name: str, target: str, tmp_path: Path) -> None:
    source, there = _golden(name), tmp_path / "converted"
    ckptcore.copy(source, there, layout=_LAYOUTS[target], context=_FAST)
    assert ckptcore.verify(there).ok
    if "checkpointables" in _EXPECTED[name]:
        several = ckptcore.load_checkpointables
        assert_same_tree(several(there, context=_FAST), several(source, context=_FAST))
        assert ckptcore.metadata(there).custom == ckptcore.metadata(source).custom
    else:
        expected, converted = ckptcore.metadata(source), ckptcore.metadata(there)
        assert converted.custom == expected.custom
        assert repr(converted.abstract) == repr(expected.abstract)
        assert_same_tree(_load(there), _load(source))


# --- storages that tensorstore does not support -----------------------------------------------------------------------


class _WithoutAddress:
    """A plugin: ``nowhere:///PATH`` is a local directory whose storage has no address for tensorstore."""

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        return {"nowhere": self._open}

    def _open(self, url: str, options: StorageOptions) -> StorageBackend:
        storage = with_faults(
            installed_plugins().storage("file")(url.replace("nowhere", "file", 1), options), FaultPlan()
        )
        assert storage.address is None
        return storage


_NOWHERE: Final = ckptcore.Context(
    plugins=ckptcore.context.PluginOptions(extra=(_WithoutAddress(),)), durability="none"
)


@pytest.mark.parametrize("name", _EXPECTED)
def test_checkpoints_of_orbax_load_where_tensorstore_cannot_read(name: str) -> None:
    """ckptcore reads compressed chunks, and decodes them in memory."""
    assert_same_tree(_load(f"nowhere://{_golden(name)}", _NOWHERE), _load(_golden(name)))


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_every_layout_is_saved_and_loaded_where_tensorstore_cannot_write(
    layout: str, originals: Mapping[str, str], tmp_path: Path
) -> None:
    location = f"nowhere://{tmp_path}/checkpoint"
    ckptcore.save(location, _state(), layout=_LAYOUTS[layout], context=_NOWHERE)
    expected = ckptcore.load(originals[layout])
    assert_same_tree(ckptcore.load(location, context=_NOWHERE), expected)
    assert_same_tree(ckptcore.load(tmp_path / "checkpoint"), expected)
    assert ckptcore.verify(location, context=_NOWHERE).ok


# --- memory -----------------------------------------------------------------------------------------------------------

_MIB: Final = 1 << 20
_ARRAYS: Final = 48
_ARRAY_BYTES: Final = 32 * _MIB

_PROGRAM: Final = """
import sys
import ckptcore

source, destination, warm = sys.argv[1:]
layout = "safetensors"
if destination.endswith("compressed"):
    from ckptcore_orbax import OcdbtLayout
    layout = OcdbtLayout(compression="zstd")
context = ckptcore.Context(durability="none")
ckptcore.copy(warm, warm + "-again", layout=layout, context=context)


def peak():
    # ru_maxrss would include the peak of the parent process.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))


before = peak()
ckptcore.copy(source, destination, layout=layout, context=context)
print(peak() - before)
"""


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize("writer", ["Orbax", "ckptcore"])
@pytest.mark.parametrize("target", ["plain", "compressed"])
def test_copies_of_compressed_checkpoints_use_a_limited_amount_of_memory(
    writer: str, target: str, tmp_path: Path
) -> None:
    from orbax.checkpoint import v1

    elements = np.random.default_rng(0).standard_normal(_ARRAY_BYTES // 4, np.float32)
    state = {f"layer_{number}": elements + number for number in range(_ARRAYS)}
    small = {"w": np.zeros(_MIB, np.float32)}
    if writer == "Orbax":
        v1.save(tmp_path / "source", state)
        v1.save(tmp_path / "warm", small)
    else:
        layout = OcdbtLayout(compression="zstd")
        ckptcore.save(tmp_path / "source", state, layout=layout, context=_FAST)
        ckptcore.save(tmp_path / "warm", small, layout=layout, context=_FAST)
    arguments = [str(tmp_path / "source"), str(tmp_path / target), str(tmp_path / "warm")]
    copied = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert copied.returncode == 0, copied.stderr
    # A copy decodes up to 128 MiB at a time, and encodes up to 128 MiB. Encoded chunks that wait for their write take
    # up to 288 MiB. In addition, malloc caches memory.
    assert int(copied.stdout) < _ARRAYS * _ARRAY_BYTES * 0.55
    loaded = ckptcore.load(tmp_path / target)
    assert all(np.array_equal(loaded[name], array) for name, array in state.items())
