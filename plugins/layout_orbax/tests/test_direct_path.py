"""Writes and reads without tensorstore, compared with those of tensorstore."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import tensorstore as ts
from ckptcore_orbax import ArrayRule, OcdbtLayout, Zarr3Layout, ZarrLayout
from ckptcore_testing import DTYPE_NAMES, FaultPlan, assert_same_bits, strategies, with_faults
from ckptcore_testing.layout_stores import StrictReadStore, local_directory
from ckptcore_testing.layout_trials import Trial, WrittenTrial, flat_trial, write_trial
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import ckptcore
from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError
from ckptcore.io.reader import ObjectReader
from ckptcore.io.threads import IOThreads
from ckptcore.model import BLOCK_BYTES, ArrayRecord, ArraySpec, Box, HostArray
from ckptcore.protocols import Layout
from plugins.layout_orbax.tests.foreign_arrays import (
    DATABASES,
    ForeignArray,
    foreign_arrays,
    open_array,
    write_arrays,
)

_some = settings(deadline=None, suppress_health_check=list(HealthCheck))
_many = settings(_some, max_examples=500)


# --- written here, read by tensorstore --------------------------------------------------------------------------------


def _layouts() -> st.SearchStrategy[Layout]:
    chunk_bytes = st.sampled_from([None, 1, 16, 64, 200])
    compression = st.sampled_from([None, None, None, "zstd", "gzip", "blosc", "zstd:9"])
    rules = st.sampled_from(
        [(), (ArrayRule(pattern="a0", chunk_bytes=8, compression="none"), ArrayRule(pattern="a?", checksum=False))]
    )
    ocdbt = st.builds(
        OcdbtLayout,
        chunk_bytes=chunk_bytes,
        compression=compression,
        rules=rules,
        item=st.sampled_from(["state", ""]),
        checksum=st.booleans(),
        zarr_format=st.sampled_from([2, 3, 3]),
        data_file_bytes=st.sampled_from([1, 100, 1 << 30]),
    )
    zarr3 = st.builds(
        Zarr3Layout, chunk_bytes=chunk_bytes, compression=compression, rules=rules, checksum=st.booleans()
    )
    return st.one_of(
        ocdbt, ocdbt, zarr3, st.builds(ZarrLayout, chunk_bytes=chunk_bytes, compression=compression, rules=rules)
    )


@st.composite
def _trials(draw: st.DrawFn) -> Trial:
    size = draw(st.integers(1, 3))
    specs = draw(st.lists(strategies.specs(DTYPE_NAMES, max_side=9), min_size=1, max_size=3))
    parts: dict[int, list[list[Box]]] = {}
    for number, spec in enumerate(specs):
        ranks: list[list[Box]] = [[] for _ in range(size)]
        for box in draw(strategies.partitions(spec.shape)):
            ranks[draw(st.integers(0, size - 1))].append(box)
        parts[number] = ranks
    return flat_trial({f"a{number}": spec for number, spec in enumerate(specs)}, parts=parts, size=size)


def _opened(written: WrittenTrial, root: Path, name: str) -> Any:
    """Open an array of a checkpoint with tensorstore, from only its location."""
    layout: Any = written.layout
    state: Any = written.state
    directory = f"{root / state['directory']}/"
    if layout.name == "ocdbt":
        kvstore = {"driver": "ocdbt", "base": f"file://{directory}", "path": f"{name}/"}
    else:
        kvstore = {"driver": "file", "path": f"{directory}{name}/"}
    zarr_format = state["formats"][state["format"][state["name"].index(name)]][0]
    spec = {
        "driver": "zarr3" if zarr_format == 3 else "zarr",
        "kvstore": kvstore,
        "fill_missing_data_reads": False,
    }
    return ts.open(spec, open=True, read=True).result()


@_some
@given(trial=_trials(), layout=_layouts(), data=st.data())
def test_tensorstore_reads_arrays_of_ckptcore(trial: Trial, layout: Layout, data: st.DataObject) -> None:
    _assert_tensorstore_reads(trial, layout, data)


@pytest.mark.slow
@_many
@given(trial=_trials(), layout=_layouts(), data=st.data())
def test_tensorstore_reads_many_arrays_of_ckptcore(trial: Trial, layout: Layout, data: st.DataObject) -> None:
    _assert_tensorstore_reads(trial, layout, data)


def _assert_tensorstore_reads(trial: Trial, layout: Layout, data: st.DataObject) -> None:
    layout.check(trial.tree, trial.size)
    with tempfile.TemporaryDirectory() as directory:
        written = write_trial(layout, trial, local_directory(Path(directory)))
        for leaf, elements in trial.arrays.items():
            stored = _opened(written, Path(directory), f"a{leaf}")
            assert stored.shape[: elements.ndim] == elements.shape
            for box in [Box.whole(elements.shape), data.draw(strategies.boxes(elements.shape))]:
                if box.size:
                    read = np.ascontiguousarray(stored[box.slices].read().result())
                    assert read.tobytes() == np.ascontiguousarray(elements[box.slices]).tobytes(), box
        written.assert_reads_back()


# --- written by tensorstore, read here --------------------------------------------------------------------------------


_Foreign: TypeAlias = tuple[Mapping[str, ForeignArray], Mapping[str, Any] | None]
"""Arrays by name, and the options of their database. None: files without a database."""


@st.composite
def _foreign(draw: st.DrawFn) -> _Foreign:
    zarr_format = draw(st.sampled_from([2, 3, 3]))
    arrays = draw(st.lists(foreign_arrays(zarr_format), min_size=1, max_size=3))
    first = arrays[0]
    database = draw(st.one_of(st.none(), DATABASES))
    return {
        f"a{number}": array for number, array in enumerate(arrays) if array.stores_fill_value == first.stores_fill_value
    }, database


def _stores(directory: Path) -> Sequence[Any]:
    empty = WrittenTrial(flat_trial({}), OcdbtLayout(), local_directory(directory), None, {}, {})
    return empty.stores(verified=False)


def _layout(zarr_format: int, database: object) -> Layout:
    if database is not None:
        return OcdbtLayout()
    return Zarr3Layout() if zarr_format == 3 else ZarrLayout()


@_some
@given(foreign=_foreign(), data=st.data())
def test_arrays_of_tensorstore_are_read(foreign: _Foreign, data: st.DataObject) -> None:
    _assert_read(foreign, data)


@pytest.mark.slow
@_many
@given(foreign=_foreign(), data=st.data())
def test_many_arrays_of_tensorstore_are_read(foreign: _Foreign, data: st.DataObject) -> None:
    _assert_read(foreign, data)


def _assert_read(foreign: _Foreign, data: st.DataObject) -> None:
    """Compare elements. If tensorstore raises an error for a missing chunk, ckptcore must raise one, too."""
    arrays, database = foreign
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "tree"
        write_arrays(directory, arrays, database)
        layout = _layout(next(iter(arrays.values())).zarr_format, database)
        stores = _stores(directory)
        inspected = layout.inspect(stores[0], None)
        assert inspected is not None
        assert [str(path[0]) for path in inspected.tree.paths] == list(arrays)
        for leaf, (name, array) in enumerate(arrays.items()):
            record = inspected.tree.leaves[leaf]
            assert isinstance(record, ArrayRecord) and record.spec == array.spec
            stored = open_array(directory, name, array, database, fill_missing_data_reads=array.may_have_holes)
            for box in [
                Box.whole(array.spec.shape),
                *data.draw(st.lists(strategies.boxes(array.spec.shape), max_size=2)),
            ]:
                expected = _read(stored, box)
                event("missing" if expected is None else "there")
                for store in stores:
                    written = WrittenTrial(
                        Trial(inspected.tree, {}, {}), layout, local_directory(directory), inspected.state, {}, {}
                    )
                    if expected is None:
                        with pytest.raises((CorruptCheckpointError, ObjectNotFoundError)):
                            written.read([(leaf, box)], store=store)
                        continue
                    (elements,) = written.read([(leaf, box)], store=store)
                    assert_same_bits(elements, expected, f"{name} {box}")


def test_missing_chunks_in_nested_shards_have_the_fill_value(tmp_path: Path) -> None:
    """ckptcore decodes nested shards in memory, where a missing inner chunk is not an error."""
    spec = ArraySpec((2, 4), "float32")
    little = {"name": "bytes", "configuration": {"endian": "little"}}

    def sharded(chunk_shape: Sequence[int], codecs: Any) -> Any:
        configuration = {"chunk_shape": chunk_shape, "codecs": [codecs], "index_codecs": [little, {"name": "crc32c"}]}
        return {"name": "sharding_indexed", "configuration": configuration}

    metadata = {
        "shape": [2, 4],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 4]}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [sharded([2, 2], sharded([1, 1], little))],
        "fill_value": 0.5,
    }
    some = np.array([[1, 2], [3, 4]], np.float32)
    array = ForeignArray(3, spec, metadata, [(Box((0, 1), (2, 3)), some)], stores_fill_value=False)
    write_arrays(tmp_path, {"a": array}, None)
    expected = np.array([[0.5, 1, 2, 0.5], [0.5, 3, 4, 0.5]], np.float32)
    assert_same_bits(ckptcore.load(tmp_path)["a"], expected, "a")


def _read(stored: Any, box: Box) -> HostArray | None:
    """Read with tensorstore. Return None if a chunk is missing."""
    try:
        return np.asarray(stored[box.slices].read().result())
    except ValueError as error:
        assert "is missing" in str(error)
        return None


# --- imports and amounts read -----------------------------------------------------------------------------------------

_PROGRAM = """
import sys
import numpy as np
import ckptcore
from ckptcore_orbax import OcdbtLayout, Zarr3Layout, ZarrLayout

location, foreign = sys.argv[1:]
state = {"w": np.arange(3000.0).reshape(30, 100), "half": np.ones(7, np.float16), "text": "x", "one": 1}
layouts = "ocdbt", "zarr3", "zarr", OcdbtLayout(chunk_bytes=500, zarr_format=2), Zarr3Layout(chunk_bytes=500)
for number, layout in enumerate(layouts):
    there = f"{location}/{number}"
    ckptcore.save(there, state, layout=layout)
    loaded = ckptcore.load(there, {**state, "w": ckptcore.AbstractArray((30, 100), "float64")})
    assert all(np.array_equal(loaded[name], state[name]) for name in state)
    assert ckptcore.metadata(there).custom == {} and ckptcore.verify(there).ok
assert np.array_equal(ckptcore.load(foreign)["a"], np.arange(5000, dtype=np.int32))
assert "tensorstore" not in sys.modules, "tensorstore was imported"
ckptcore.save(f"{location}/compressed", state, layout=OcdbtLayout(compression="zstd"))
assert "tensorstore" in sys.modules, "this check does not detect tensorstore"
"""


@pytest.mark.system
def test_uncompressed_arrays_do_not_need_tensorstore(tmp_path: Path) -> None:
    elements = np.arange(5000, dtype=np.int32)
    spec = ArraySpec(elements.shape, "int32")
    metadata = {"shape": [5000], "chunks": [600], "dtype": "<i4", "compressor": None, "filters": None, "order": "C",
                "fill_value": None, "zarr_format": 2}  # fmt: skip
    array = ForeignArray(2, spec, metadata, [(Box.whole(spec.shape), elements)], True)
    write_arrays(tmp_path / "foreign", {"a": array}, {"compression": {"id": "zstd"}})
    subprocess.run([sys.executable, "-c", _PROGRAM, str(tmp_path), str(tmp_path / "foreign")], check=True, timeout=120)


@pytest.mark.parametrize(
    "layout",
    [
        OcdbtLayout(chunk_bytes=1 << 14, data_file_bytes=1 << 20),
        OcdbtLayout(chunk_bytes=1 << 14, checksum=False),
        OcdbtLayout(chunk_bytes=1 << 14, zarr_format=2),
        Zarr3Layout(chunk_bytes=1 << 14),
        ZarrLayout(chunk_bytes=1 << 14),
    ],
    ids=["ocdbt", "ocdbt without checksums", "ocdbt of zarr 2", "zarr3", "zarr"],
)
@pytest.mark.parametrize("verified", [True, False])
def test_no_byte_is_read_twice(layout: Layout, verified: bool, tmp_path: Path) -> None:
    specs = {
        "large": ArraySpec((700, 1000), "float32"),
        "odd": ArraySpec((333, 77), "int16"),
        "small": ArraySpec((), "int8"),
    }
    written = write_trial(layout, flat_trial(specs), local_directory(tmp_path))
    sizes = {key: record.size for key, record in written.records.items()}
    reader, plan = _counted(written, verified)
    written.assert_reads_back(stores=[reader])
    ranges: dict[str, list[tuple[int, int]]] = {}
    for operation in plan.operations:
        if operation.name == "get_into":
            ranges.setdefault(operation.keys[0], []).append((operation.offset, operation.offset + operation.nbytes))
    read = 0
    for key, of_key in ranges.items():
        of_key.sort()
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(of_key)), f"{key}: {of_key}"
        assert of_key[-1][1] <= sizes[key]
        read += sum(stop - start for start, stop in of_key)
    elements = sum(spec.nbytes for spec in specs.values())
    assert elements <= read == reader.bytes_read <= sum(sizes[key] for key in ranges)
    assert read <= elements * 1.15 + 4096, "more than elements, their checksums and the padding at the edges of arrays"


def test_a_shard_reads_only_the_chunks_that_it_needs(tmp_path: Path) -> None:
    """The shard has one sixteenth of the rows of an array with small read chunks."""
    spec = ArraySpec((8192, 512), "float32")
    written = write_trial(OcdbtLayout(chunk_bytes=1 << 15), flat_trial({"w": spec}), local_directory(tmp_path))
    box = Box((512, 0), (1024, 512))
    wanted = box.size * 4
    checksums = math.ceil(wanted / (1 << 15)) * 4
    # The checksums of blocks identify the save. Therefore verified reads take whole blocks if that
    # is only a few bytes more.
    for verified, most in (True, wanted + 2 * BLOCK_BYTES), (False, wanted + checksums + 4):
        reader, _ = _counted(written, verified)
        written.assert_reads_back([(0, box)], stores=[reader])
        assert wanted <= reader.bytes_read <= most


def _counted(written: WrittenTrial, verified: bool) -> tuple[Any, FaultPlan]:
    """Return a store for loads, and the plan that records its requests."""
    plan = FaultPlan()
    storage = with_faults(written.storage, plan)
    return ObjectReader(storage, written.records, IOThreads(1), verify=verified), plan


def test_tensorstore_reads_a_directory_by_its_address(tmp_path: Path) -> None:
    """tensorstore itself reads compressed chunks of other software, if it supports the storage."""
    elements = np.arange(100, dtype=np.int32)
    spec = ArraySpec((100,), "int32")
    metadata = {"shape": [100], "chunks": [60], "dtype": "<i4", "compressor": {"id": "zstd", "level": 1},
                "filters": None, "order": "C", "fill_value": None, "zarr_format": 2}  # fmt: skip
    write_arrays(tmp_path, {"a": ForeignArray(2, spec, metadata, [(Box.whole((100,)), elements)], True)}, None)
    storage = local_directory(tmp_path)
    store = StrictReadStore(storage)
    inspected = ZarrLayout().inspect(store, None)
    assert inspected is not None
    written = WrittenTrial(Trial(inspected.tree, {}, {}), ZarrLayout(), storage, inspected.state, {}, {})
    assert_same_bits(written.read(store=store)[0], elements, "a")
