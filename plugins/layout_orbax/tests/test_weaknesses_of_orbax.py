"""Known weaknesses of Orbax. ckptcore does not share them, and Orbax never misreads checkpoints of ckptcore."""

import collections
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from ckptcore_orbax import OcdbtLayout, Zarr3Layout, ZarrLayout
from orbax.checkpoint import v1

import ckptcore
from ckptcore.errors import CheckpointError, CorruptCheckpointError, TreeMismatchError, UnsupportedLeafError
from plugins.layout_orbax.tests.orbax_states import (
    LAYOUTS,
    assert_same,
    flipped,
    host,
    jax_state,
    numbers,
    places_of,
    seen_by_orbax,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
    # If a load of Orbax fails, its other tasks outlive their event loop.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

KINDS = {"ocdbt": OcdbtLayout(), "zarr3": Zarr3Layout(), "zarr": ZarrLayout()}


def plainly(location, state, **options):
    """Save with Orbax, without compression."""
    saving = v1.options.ArrayOptions.Saving(use_compression=False, **options)
    with v1.Context(array_options=v1.options.ArrayOptions(saving=saving)):
        v1.save(location, state)


def files_in(location):
    return sorted(path for path in location.rglob("*") if path.is_file())


def file_of(location, array):
    """Return the only file with the elements of an array, and their offset in it."""
    ((path, offset),) = [(path, place) for path in files_in(location) for place in places_of(path, array.tobytes())]
    return path, offset


# Flipped bits


DAMAGED = {
    **KINDS,
    "ocdbt-chunks": OcdbtLayout(chunk_bytes=512),
    "ocdbt-unchecked": OcdbtLayout(checksum=False),
    "ocdbt-zarr2": OcdbtLayout(zarr_format=2),
    "ocdbt-zstd": OcdbtLayout(compression="zstd"),
    "zarr-blosc": ZarrLayout(compression="blosc"),
}


@pytest.mark.parametrize("layout", DAMAGED)
def test_flipped_bits_never_change_loaded_elements(tmp_path, layout):
    """The test flips bits in all files: data, checksums, indexes, nodes, manifests and metadata. Unused bits load."""
    location = tmp_path / "c"
    noise = np.random.default_rng(0).normal(size=600).astype(np.float32)
    state = {
        "noise": noise,
        "small": numbers("int8"),
        "zero": np.zeros((40, 5)),
        "count": 3,
        "text": "größe",
        "flag": True,
    }
    ckptcore.save(location, state, layout=DAMAGED[layout])
    seen = 0
    for path in files_in(location):
        size = path.stat().st_size
        for position in sorted({*range(0, size, 1 + size // 12), *range(size - 1, max(-1, size - 4), -1)}):
            flipped(path, position, position % 8)
            try:
                loaded = ckptcore.load(location)
            except CheckpointError:
                seen += 1
            else:
                assert_same(loaded, state, f"{path.name}[{position}]")
            flipped(path, position, position % 8)
    assert seen > 12  # at least all flipped bits of elements
    assert_same(ckptcore.load(location), state)


@pytest.mark.parametrize("layout", DAMAGED)
def test_flipped_bits_of_elements_are_detected(tmp_path, layout):
    location = tmp_path / "c"
    noise = np.random.default_rng(0).normal(size=600).astype(np.float32)
    ckptcore.save(location, {"noise": noise}, layout=DAMAGED[layout])
    if DAMAGED[layout].compression is None:
        places = [file_of(location, noise[place : place + 3]) for place in range(0, 590, 30)]
    else:
        path = max(files_in(location), key=lambda path: path.stat().st_size)
        places = [(path, path.stat().st_size * place // 20) for place in range(2, 18)]
    for path, position in places:
        flipped(path, position)
        with pytest.raises(CorruptCheckpointError):
            ckptcore.load(location)
        assert not ckptcore.verify(location).ok
        flipped(path, position)
    assert ckptcore.verify(location).ok


def test_orbax_detects_flipped_bits_in_nodes_and_manifests(tmp_path):
    ckptcore.save(tmp_path / "c", {"w": np.arange(500.0)}, layout="ocdbt")
    (node,) = (tmp_path / "c" / "state" / "d").iterdir()
    for path in (node, tmp_path / "c" / "state" / "manifest.ocdbt"):
        for position in range(0, path.stat().st_size, 40):
            flipped(path, position)
            with pytest.raises(Exception, match=r"(?i)checksum|crc|ocdbt|corrupt|valid|DATA_LOSS|FAILED_PRECONDITION"):
                v1.load(tmp_path / "c")
            flipped(path, position)


@pytest.mark.parametrize("compressed", [False, True])
def test_flipped_bits_of_elements_of_orbax_are_not_detected(tmp_path, compressed):
    """In chunks of Orbax, only the index has a checksum. A conversion adds a checksum to each chunk."""
    noise = np.random.default_rng(0).normal(size=600).astype(np.float32)
    saving = v1.options.ArrayOptions.Saving(use_compression=compressed, use_ocdbt=False)
    with v1.Context(array_options=v1.options.ArrayOptions(saving=saving)):
        v1.save(tmp_path / "c", {"noise": noise})
    ckptcore.copy(tmp_path / "c", tmp_path / "safe", layout="ocdbt")
    path = max(files_in(tmp_path / "c"), key=lambda path: path.stat().st_size)
    flipped(path, 1200, 3)
    assert (ckptcore.load(tmp_path / "c")["noise"] != noise).sum() == 1
    flipped(*file_of(tmp_path / "safe", noise))
    with pytest.raises(CorruptCheckpointError):
        ckptcore.load(tmp_path / "safe")


@pytest.mark.parametrize("name", ["d", "manifest.ocdbt"])
def test_flipped_bits_in_nodes_and_manifests_of_orbax_are_detected(tmp_path, name):
    plainly(tmp_path / "c", {"noise": np.arange(600.0)})
    path = tmp_path / "c" / "state" / name
    if path.is_dir():
        path = max(path.iterdir(), key=lambda path: path.stat().st_size)
    for position in range(0, path.stat().st_size, 1 + path.stat().st_size // 40):
        flipped(path, position, position % 8)
        with pytest.raises(CheckpointError):
            ckptcore.load(tmp_path / "c")
        flipped(path, position, position % 8)


@pytest.mark.parametrize(("files", "compressed"), [(False, False), (True, False), (True, True)])
def test_flipped_bits_in_chunk_indexes_of_orbax_never_move_elements(tmp_path, files, compressed):
    """The index has a checksum. A load of an uncompressed array may not need the index."""
    array = np.random.default_rng(0).normal(size=600)
    saving = v1.options.ArrayOptions.Saving(use_compression=compressed, use_ocdbt=not files)
    with v1.Context(array_options=v1.options.ArrayOptions(saving=saving)):
        v1.save(tmp_path / "c", {"a": array})
    path = max(files_in(tmp_path / "c"), key=lambda path: path.stat().st_size)
    end = path.stat().st_size
    if not files:
        end = file_of(tmp_path / "c", array)[1] + array.nbytes + 20
    for position in range(end - 20, end):
        flipped(path, position, position % 8)
        try:
            assert_same(ckptcore.load(tmp_path / "c"), {"a": array})
        except CorruptCheckpointError:
            pass
        else:
            assert not compressed
        flipped(path, position, position % 8)


@pytest.mark.parametrize("name", ["_METADATA", "_CHECKPOINT_METADATA", "_sharding", "_strings.json", "process_0"])
def test_flipped_bits_in_json_of_orbax_raise_only_checkpoint_errors(tmp_path, name):
    """JSON has no checksum. If the file stays valid, the load returns the right elements."""
    state = {"w": jnp.arange(6.0), "key": jax.random.key(0), "name": "text"}
    plainly(tmp_path / "c", state)
    (path,) = (path for path in files_in(tmp_path / "c") if path.name == name)
    for position in range(0, path.stat().st_size, 1 + path.stat().st_size // 60):
        flipped(path, position, position % 7)
        try:
            loaded = ckptcore.load(tmp_path / "c")
        except CheckpointError:
            pass
        else:
            known = [host(state["w"]).tobytes(), np.asarray(jax.random.key_data(state["key"])).tobytes()]
            assert all(leaf.tobytes() in known for leaf in jax.tree.leaves(loaded) if isinstance(leaf, np.ndarray))
        flipped(path, position, position % 7)


# Names that are equal in Orbax


X, Y = np.full(2, 1.0), np.full(2, 2.0)
SAME_IN_ORBAX = [
    {"a.b": X, "a": {"b": Y}},
    {"l": [X], "l.0": Y},
    {0: X, "0": Y},
    {"a.b": X, "a": {"b": 2.5}},
    {"a.b": "one", "a": {"b": "two"}},
    {"a//b": X, "a/b": Y},
    {"a/./b": X, "a/b": Y},
    {"q/../a": X, "a": Y},
    {"/a": X, "a": Y},
    {"": X, "a": Y},
    {"A": X, "a": Y},
    {"a": {"": X}, "a.": Y},
    {"zarr.json": X, "c": {"0": Y}, "d": X},
    {"a~1b": "one", "a/b": "two"},
]
MISTAKEN = [
    {"a/": X, "a": Y},
    {"a\\b": X, "a/b": Y},
]


@pytest.mark.parametrize("layout", KINDS)
@pytest.mark.parametrize("tree", SAME_IN_ORBAX, ids=str)
def test_arrays_with_colliding_names_are_never_confused(tmp_path, layout, tree):
    _check_unique(tmp_path, layout, tree)


@pytest.mark.parametrize("layout", KINDS)
@pytest.mark.parametrize("tree", MISTAKEN, ids=str)
def test_arrays_with_names_of_one_path_are_never_confused(tmp_path, layout, tree):
    _check_unique(tmp_path, layout, tree)


def _check_unique(tmp_path, layout, tree):
    """Assert that ckptcore loads the saved tree, and that Orbax loads the same tree or raises an error."""
    ckptcore.save(tmp_path / "c", tree, layout=KINDS[layout])
    assert_same(ckptcore.load(tmp_path / "c"), tree)
    try:
        loaded = v1.load(tmp_path / "c")
    except Exception as error:  # noqa: BLE001  # Orbax has no own type for this error
        assert "Error" in type(error).__name__ or str(error)
        return
    assert_same(loaded, seen_by_orbax(tree))


# Overwriting, shapes, flags


@pytest.mark.parametrize("layout", KINDS)
def test_a_failed_overwrite_leaves_the_old_checkpoint(tmp_path, layout):
    ckptcore.save(tmp_path / "c", {"w": X}, layout=KINDS[layout])
    with pytest.raises(UnsupportedLeafError):
        ckptcore.save(tmp_path / "c", {"w": Y, "bad": object()}, layout=KINDS[layout], overwrite=True)
    assert_same(ckptcore.load(tmp_path / "c"), {"w": X})
    assert_same(v1.load(tmp_path / "c"), {"w": X})
    ckptcore.save(tmp_path / "c", {"w": Y}, layout=KINDS[layout], overwrite=True)
    assert_same(v1.load(tmp_path / "c"), {"w": Y})


def test_overwriting_with_another_layout_replaces_the_whole_tree(tmp_path):
    for layout in ("ocdbt", "zarr3", "safetensors", "zarr", "ocdbt"):
        ckptcore.save(tmp_path / "c", {"w": X, layout: Y}, layout=layout, overwrite=True)
        assert_same(ckptcore.load(tmp_path / "c"), {"w": X, layout: Y})
        if layout != "safetensors":
            assert_same(v1.load(tmp_path / "c"), {"w": X, layout: Y})


@pytest.mark.parametrize("writer", ["ocdbt", "zarr", "orbax"])
@pytest.mark.parametrize(
    "asked",
    [
        np.empty((3, 2)),
        np.empty(6),
        np.empty((2, 3, 1)),
        jax.ShapeDtypeStruct((2, 4), "float64"),
        np.empty((2, 3), "f4"),
    ],
)
def test_another_shape_or_dtype_is_an_error(tmp_path, writer, asked):
    state = {"w": np.arange(6.0).reshape(2, 3)}
    if writer == "orbax":
        v1.save(tmp_path / "c", state)
    else:
        ckptcore.save(tmp_path / "c", state, layout=writer)
    with pytest.raises(TreeMismatchError, match="w"):
        ckptcore.load(tmp_path / "c", {"w": asked})


@pytest.mark.parametrize("writer", ["ocdbt", "zarr3", "zarr", "orbax"])
def test_metadata_of_trees_with_flags_is_read(tmp_path, writer):
    state = {"flag": True, "w": jnp.ones(3)}
    if writer == "orbax":
        v1.save(tmp_path / "c", state)
    else:
        ckptcore.save(tmp_path / "c", state, layout=writer)
    abstract = ckptcore.metadata(tmp_path / "c").abstract
    assert abstract["flag"] is True
    assert abstract["w"].shape == (3,)


# Leaves and containers that Orbax rejects or changes


Pair = collections.namedtuple("Pair", ["mu", "nu"])  # programs define named tuples in this way
ODD = {
    "zero-size": np.zeros((0, 3), np.float32),
    "zero-size of JAX": jnp.zeros((2, 0), jnp.bfloat16),
    "scalar of NumPy": np.float16(0.3),
    "flag of NumPy": np.bool_(True),
    "bytes": b"\x00\xff",
    "no bytes": b"",
    "complex": 1 - 2j,
    "large int": 2**64 - 1,
    "huge int": -(2**100),
    "nan": [float("nan"), float("inf")],
    "tensor": torch.arange(3, dtype=torch.int16),
    "bfloat16 tensor": torch.ones(2, 2, dtype=torch.bfloat16),
    "int keys": {3: np.ones(2), -1: {0: "a"}},
    "mixed keys": {"a": 1, 7: 2},
    "tuple": (np.ones(1), (2, [3])),
    "empty tuple": (),
    "datetime": np.arange(3).astype("datetime64[s]").astype(np.int64),
    "empty text": "",
    "surrogate": "\ud800",
}


@pytest.mark.parametrize("layout", KINDS)
@pytest.mark.parametrize("name", ODD)
def test_leaves_and_containers_that_orbax_lacks(tmp_path, layout, name):
    """ckptcore loads such leaves unchanged. Orbax loads all other leaves of the checkpoint."""
    state = {"odd": ODD[name], "w": np.ones(3)}
    ckptcore.save(tmp_path / "c", state, layout=KINDS[layout])
    loaded = ckptcore.load(tmp_path / "c")
    if name.endswith("JAX"):
        state = host(state)
    if name.endswith("tensor"):
        state = seen_by_orbax(state)
    if name == "nan":
        assert str(loaded) == str(state)
    else:
        assert_same(loaded, state)
    assert_same(v1.load(tmp_path / "c")["w"], state["w"])


def test_named_tuples_keep_their_fields(tmp_path):
    state = {"pair": Pair(np.ones(2), Pair(1, np.zeros(1)))}
    ckptcore.save(tmp_path / "c", state, layout="ocdbt")
    loaded = ckptcore.load(tmp_path / "c", state)
    assert isinstance(loaded["pair"], Pair)
    assert isinstance(loaded["pair"].nu, Pair)
    assert_same(loaded["pair"].mu, np.ones(2))
    assert_same(v1.load(tmp_path / "c"), seen_by_orbax(state))


# Missing files


OPTIONAL = ("_sharding", "orbax.checkpoint", "commit_success.txt", "_CHECKPOINT_METADATA", "array_metadatas")


@pytest.mark.parametrize("name", OPTIONAL)
def test_optional_files_of_orbax_may_be_missing(tmp_path, name):
    state = {"w": jnp.arange(4.0), "text": "a", "count": 2}
    v1.save(tmp_path / "c", state)
    for path in list((tmp_path / "c").rglob(name)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert_same(ckptcore.load(tmp_path / "c"), host(state))


@pytest.mark.parametrize("layout", [*KINDS, "ocdbt-zstd"])
def test_without_its_root_a_checkpoint_is_one_of_orbax(tmp_path, layout):
    """The files in the format of Orbax contain all elements, but not the metadata that only ckptcore has."""
    state = jax_state()
    ckptcore.save(tmp_path / "c", state, layout=LAYOUTS[layout], metadata={"run": 1})
    (tmp_path / "c" / "checkpoint.json").unlink()
    shutil.rmtree(tmp_path / "c" / ".ckptcore", ignore_errors=True)
    assert_same(ckptcore.load(tmp_path / "c"), host(seen_by_orbax(state)))
    assert ckptcore.metadata(tmp_path / "c").custom == {"run": 1}


@pytest.mark.parametrize("layout", KINDS)
def test_missing_files_never_change_loaded_elements(tmp_path, layout):
    """A missing file with elements or their metadata is an error. Files that only Orbax reads may be missing."""
    state = {"w": np.arange(500.0), "v": np.ones(3)}
    ckptcore.save(tmp_path / "c", state, layout=KINDS[layout])
    missed = 0
    for path in files_in(tmp_path / "c"):
        if path.name == "checkpoint.json":
            continue
        data = path.read_bytes()
        path.unlink()
        try:
            assert_same(ckptcore.load(tmp_path / "c"), state)
        except CorruptCheckpointError:
            missed += 1
        path.write_bytes(data)
    assert missed >= 2


@pytest.mark.parametrize("files", [False, True])
@pytest.mark.parametrize("compressed", [False, True])
def test_missing_files_with_elements_of_orbax_are_an_error(tmp_path, files, compressed):
    """The load does not return zeros, because the metadata of Orbax says that every chunk is stored."""
    saving = v1.options.ArrayOptions.Saving(use_compression=compressed, use_ocdbt=not files)
    with v1.Context(array_options=v1.options.ArrayOptions(saving=saving)):
        v1.save(tmp_path / "c", {"w": np.random.default_rng(0).normal(size=5000)})
    max(files_in(tmp_path / "c"), key=lambda path: path.stat().st_size).unlink()
    with pytest.raises(CorruptCheckpointError):
        ckptcore.load(tmp_path / "c")


@pytest.mark.parametrize("name", ["manifest.ocdbt", "_strings.json", "_METADATA"])
def test_missing_required_files_of_orbax(tmp_path, name):
    """A missing file is an error. Only `_METADATA` may be missing: then the names of arrays form the tree."""
    v1.save(tmp_path / "c", {"a": {"w": np.ones(3)}, "text": "a"})
    (tmp_path / "c" / "state" / name).unlink()
    if name == "_METADATA":
        assert_same(ckptcore.load(tmp_path / "c"), {"a": {"w": np.ones(3)}})
        return
    with pytest.raises(CheckpointError):
        ckptcore.load(tmp_path / "c")


# Logs


@pytest.mark.parametrize("layout", KINDS)
def test_nothing_is_logged_or_printed(tmp_path, caplog, capfd, layout):
    caplog.set_level(logging.INFO)
    ckptcore.save(tmp_path / "c", {"w": jnp.ones(3)}, layout=KINDS[layout])
    ckptcore.load(tmp_path / "c")
    ckptcore.metadata(tmp_path / "c")
    ckptcore.copy(tmp_path / "c", tmp_path / "d", layout="ocdbt")
    assert [record.getMessage() for record in caplog.records] == []
    assert capfd.readouterr() == ("", "")
