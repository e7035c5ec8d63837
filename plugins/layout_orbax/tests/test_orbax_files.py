"""Metadata files in the format of Orbax. ckptcore reads and writes the same contents as Orbax."""

import json
import math

import msgpack
import numpy as np
import pytest
import tensorstore as ts
from ckptcore_orbax import OcdbtLayout
from ckptcore_orbax.orbax.aggregate import parse_aggregate
from ckptcore_orbax.orbax.composites import find_composite
from ckptcore_orbax.orbax.item_files import Strings, encode_strings, item_files
from ckptcore_orbax.orbax.items import find_item
from ckptcore_orbax.orbax.markers import PYTREE_HANDLER, encode_metrics, marker_files
from ckptcore_orbax.orbax.shardings import encode_shardings, parse_shardings
from ckptcore_orbax.orbax.tree_file import orbax_name, parse_tree
from ckptcore_orbax.orbax.trees import scalar_record, value_array, value_record, value_text, value_type
from ckptcore_testing.layout_stores import DirectoryReadStore
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptcore
from ckptcore.errors import CheckpointError, CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import LEAF, ArrayRecord, ArraySpec, Attribute, Node, TreeMetadata, ValueRecord, unreadable_error

ON_ONE = {"sharding": {"type": "SingleDeviceSharding", "device": "cpu:0"}}


def described(value):
    """Return the tree of a state, and its arrays by leaf. A tuple of an array, a kind and notes is a
    leaf of JAX.
    """
    leaves, arrays = [], {}

    def node(inner):
        if isinstance(inner, dict):
            kind = "object" if inner and all(isinstance(key, Attribute) for key in inner) else "dict"
            return Node(kind, tuple(inner), tuple([node(child) for child in inner.values()]))
        if isinstance(inner, list):
            return Node("list", tuple(range(len(inner))), tuple([node(child) for child in inner]))
        if isinstance(inner, tuple) and not (len(inner) == 3 and isinstance(inner[0], np.ndarray)):
            return Node("tuple", tuple(range(len(inner))), tuple([node(child) for child in inner]))
        if isinstance(inner, tuple):
            array, kind, notes = inner
            arrays[len(leaves)] = array
            leaves.append(ArrayRecord(ArraySpec(array.shape, array.dtype.name), kind, notes=notes))
        elif isinstance(inner, np.ndarray):
            arrays[len(leaves)] = inner
            leaves.append(ArrayRecord(ArraySpec(inner.shape, inner.dtype.name)))
        else:
            leaves.append(value_record(inner))
        return LEAF

    skeleton = node(value)
    return TreeMetadata(skeleton, tuple(leaves)), arrays


STATE = {
    "arrays": {
        "numpy": np.arange(6, dtype=np.float64).reshape(2, 3),
        "jax": (np.arange(4, dtype=np.float32), "array", ON_ONE),
    },
    "key": (np.asarray([0, 7], np.uint32), "jax.key", {"impl": "threefry2x32", **ON_ONE}),
    "keys": (np.arange(8, dtype=np.uint32).reshape(2, 4), "jax.key", {"impl": "rbg", **ON_ONE}),
    "empty": {"dict": {}, "list": [], "tuple": (), "none": None},
    "named": {Attribute("mu"): np.ones(2, np.float32), Attribute("nu"): 2},
    "pair": (np.zeros(1, np.int32), [1.5, "text"]),
    "layers": {0: np.ones(1, np.int8), 10: np.ones(2, np.int8)},
    "values": {
        "true": True,
        "int": -3,
        "large": 2**63 + 1,
        "huge": 2**70,
        "float": 0.25,
        "inf": -math.inf,
        "complex": 1 + 2j,
        "bytes": b"\x00\xff",
        "text": "größe",
        "a/b": "slash",
    },
}
LOADED = {
    "arrays": {"numpy": STATE["arrays"]["numpy"], "jax": STATE["arrays"]["jax"][0]},
    "empty": {"dict": {}, "list": [], "tuple": (), "none": None},
    "named": {"mu": np.ones(2, np.float32), "nu": 2},
    "pair": [np.zeros(1, np.int32), [1.5, "text"]],
    "layers": {"0": np.ones(1, np.int8), "10": np.ones(2, np.int8)},
    "values": {
        "true": True,
        "int": -3,
        "large": 2**63 + 1,
        "huge": hex(2**70),
        "float": 0.25,
        "inf": -math.inf,
        "complex": np.asarray(1 + 2j),
        "bytes": np.asarray([0, 255], np.uint8),
        "text": "größe",
        "a/b": "slash",
    },
}


def write_item(path, value, *, use_zarr3=True):
    """Write an item as the layout does, but each array with tensorstore into a directory."""
    tree, arrays = described(value)
    for name, data in item_files(tree, {}, use_ocdbt=False, use_zarr3=use_zarr3).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    for number, (keys, record) in enumerate(zip(tree.paths, tree.leaves, strict=True)):
        array = arrays[number] if isinstance(record, ArrayRecord) else value_array(record)
        if array is not None:
            spec = {
                "driver": "zarr3" if use_zarr3 else "zarr",
                "kvstore": {"driver": "file", "path": f"{path / orbax_name(keys)}/"},
                "store_data_equal_to_fill_value": True,
            }
            ts.open(spec, create=True, dtype=array.dtype, shape=array.shape).result().write(array).result()
    return tree


def assert_same(actual, expected, where=""):
    if isinstance(expected, dict):
        assert isinstance(actual, dict), where
        assert sorted(actual) == sorted(expected), where
        for key, child in expected.items():
            assert_same(actual[key], child, f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert type(actual) is type(expected), where
        assert len(actual) == len(expected), where
        for number, child in enumerate(expected):
            assert_same(actual[number], child, f"{where}/{number}")
    elif isinstance(expected, np.ndarray):
        assert np.asarray(actual).dtype == expected.dtype, where
        np.testing.assert_array_equal(np.asarray(actual), expected, where)
    else:
        assert type(actual) is type(expected), where
        assert actual == expected, where


@pytest.mark.filterwarnings("ignore")  # warnings of Orbax and JAX about each other
@pytest.mark.parametrize("use_zarr3", [True, False])
def test_orbax_loads_the_state_that_the_files_describe(tmp_path, use_zarr3):
    import jax
    from orbax.checkpoint.experimental import v1

    write_item(tmp_path / "c" / "state", STATE, use_zarr3=use_zarr3)
    markers = marker_files({"state": PYTREE_HANDLER}, "2026-01-02T03:04:05.678+00:00", 10**18, {"run": 1}, {})
    for name, data in markers.items():
        (tmp_path / "c" / name).write_bytes(data)
    loaded = v1.load(tmp_path / "c")
    keys = {name: loaded.pop(name) for name in ("key", "keys")}
    assert_same(loaded, LOADED)
    for name, impl in [("key", "threefry2x32"), ("keys", "rbg")]:
        assert str(jax.random.key_impl(keys[name])) == impl
        np.testing.assert_array_equal(jax.random.key_data(keys[name]), STATE[name][0])
    assert loaded["arrays"]["jax"].sharding == jax.sharding.SingleDeviceSharding(jax.devices()[0])
    metadata = v1.checkpointables_metadata(tmp_path / "c")
    assert metadata.custom_metadata == {"run": 1}
    assert metadata.init_timestamp_nsecs == 1767323045678000000


@pytest.mark.filterwarnings("ignore")  # warnings of Orbax and JAX about each other
def test_orbax_version_0_restores_the_state_that_the_files_describe(tmp_path):
    import orbax.checkpoint as ocp

    write_item(tmp_path / "state", LOADED, use_zarr3=False)
    with ocp.PyTreeCheckpointer() as checkpointer:
        assert_same(checkpointer.restore(tmp_path / "state"), LOADED)


@pytest.mark.parametrize("value", [np.arange(3.0), 5, {}, "x"], ids=str)
@pytest.mark.filterwarnings("ignore")  # warnings of Orbax and JAX about each other
def test_trees_of_one_leaf_and_empty_trees(tmp_path, value):
    from orbax.checkpoint.experimental import v1

    write_item(tmp_path / "c" / "state", value)
    for name, data in marker_files({"state": PYTREE_HANDLER}, "2026-01-02T03:04:05+00:00", 1, {}, {}).items():
        (tmp_path / "c" / name).write_bytes(data)
    item = find_item(DirectoryReadStore(tmp_path / "c"), "state")
    assert item.tree.skeleton == described(value)[0].skeleton
    assert_same(v1.load(tmp_path / "c"), value)


def test_written_trees_are_read_again(tmp_path):
    tree = write_item(tmp_path / "state", STATE)
    item = find_item(DirectoryReadStore(tmp_path), "state")
    assert item.zarr_format == 3
    by_name = {leaf.name: leaf for leaf in item.tree.leaves}
    for keys, record in zip(tree.paths, tree.leaves, strict=True):
        leaf = by_name[orbax_name(keys)]
        assert leaf.value_type == value_type(record)
        if isinstance(record, ArrayRecord):
            assert item.record(leaf, record.spec) == record
    assert by_name["values.text"].value == ValueRecord("str", "größe")
    assert by_name["values.a/b"].value == ValueRecord("str", "slash")


def test_metadata_files_equal_those_that_orbax_wrote(tmp_path):
    from pathlib import Path

    for golden in ("v1_default", "v1_leaves", "v1_sharded", "v1_numpy"):
        state = Path(__file__).parent / "golden" / golden / "state"
        item = find_item(DirectoryReadStore(state))
        document = json.loads((state / "_METADATA").read_text())
        shapes = {}
        if (state / "array_metadatas" / "process_0").exists():
            for entry in json.loads((state / "array_metadatas" / "process_0").read_text())["array_metadatas"]:
                metadata = entry["array_metadata"]
                shapes[metadata["param_name"]] = (tuple(metadata["write_shape"]), tuple(metadata["chunk_shape"]))
        records = []
        for leaf in item.tree.leaves:
            if leaf.value is not None:
                records.append(leaf.value)
            elif leaf.value_type == "scalar":
                records.append(ValueRecord("int", 1))
            else:
                records.append(item.record(leaf, ArraySpec((), "float32")))
        tree = TreeMetadata(item.tree.skeleton, tuple(records))
        numbered = {number: shapes[leaf.name] for number, leaf in enumerate(item.tree.leaves) if leaf.name in shapes}
        files = item_files(tree, numbered, use_ocdbt=True, use_zarr3=True)
        assert json.loads(files["_METADATA"]) == document
        for name in ("_sharding", "_strings.json"):
            theirs = json.loads((state / name).read_text()) if (state / name).exists() else {}
            ours = json.loads(files.get(name, b"{}"))
            if name == "_sharding":
                theirs = {key: json.loads(text) for key, text in theirs.items()}
                ours = {key: json.loads(text) for key, text in ours.items()}
            assert ours == theirs
        if shapes:
            ours = json.loads(files["array_metadatas/process_0"])
            theirs = json.loads((state / "array_metadatas" / "process_0").read_text())
            by_name = [
                {entry["array_metadata"]["param_name"]: entry for entry in document["array_metadatas"]}
                for document in (ours, theirs)
            ]
            assert by_name[0] == by_name[1]


def test_leaves_with_one_name_in_orbax_get_no_ambiguous_entries():
    tree, _ = described(
        {"a.b": "x", "a": {"b": "y"}, 1: (np.ones(1), "array", ON_ONE), "1": (np.ones(2), "array", ON_ONE)}
    )
    files = item_files(tree, {}, use_ocdbt=True, use_zarr3=True)
    assert "_strings.json" not in files
    assert json.loads(files["_sharding"]) == {}
    assert sorted(json.loads(files["_METADATA"])["tree_metadata"]) == ["('1',)", "('a', 'b')", "('a.b',)"]


def test_written_markers_and_metrics_are_read_again(tmp_path):
    metrics = {"loss": 0.5, "nan": math.nan, "inf": math.inf}
    files = marker_files({"a": PYTREE_HANDLER}, "2026-01-02T03:04:05.678+00:00", 10**18, {"x": [1]}, metrics)
    assert files["orbax.checkpoint"] == b""
    write_item(tmp_path / "a", {"x": 1})
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    composite = find_composite(DirectoryReadStore(tmp_path))
    assert (composite.members, composite.default_tree, composite.custom) == ({"a": "tree"}, "a", {"x": [1]})
    assert composite.created == "2026-01-02T03:04:05.678+00:00"
    assert math.isnan(composite.metrics.pop("nan"))
    assert composite.metrics == {"loss": 0.5, "inf": math.inf}
    assert json.loads(encode_metrics({"loss": 0.5})) == {"loss": 0.5}


@pytest.mark.parametrize(
    "note",
    [
        {"type": "NamedSharding", "mesh": {"x": 2, "y": 2}, "spec": [None, "x", ["x", "y"]],
         "devices": [3, 1, 2, 0], "axis_types": ["Auto", "Explicit"]},
        {"type": "NamedSharding", "mesh": {"x": 1}, "spec": [], "devices": [0]},
        {"type": "SingleDeviceSharding", "device": "TPU_0(process=0,(0,0,0,0))"},
    ],
    ids=lambda note: note["type"],
)  # fmt: skip
def test_written_shardings_are_read_again(note):
    assert parse_shardings(encode_shardings({"a/ü": note}), "_sharding") == {"a/ü": note}


def test_devices_in_order_are_written_only_for_small_meshes():
    def mesh_of(size):
        note = {"type": "NamedSharding", "mesh": {"x": size // 2, "y": 2}, "spec": ["x"]}
        return parse_shardings(encode_shardings({"a": note}), "_sharding")["a"].get("devices")

    assert mesh_of(8) == list(range(8))
    assert mesh_of(1024) is None


def test_shardings_of_unknown_classes_and_of_old_device_names():
    assert parse_shardings(encode_shardings({"a": {"type": "GSPMDSharding", "devices": 4}, "b": 5}), "_sharding") == {}
    old = {"YQ==": json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": "TFRT_CPU_3"})}
    assert parse_shardings(json.dumps(old).encode(), "_sharding")["a"]["device"] == "cpu:3"
    other = {"YQ==": json.dumps({"sharding_type": "PositionalSharding", "shape": [4]})}
    assert parse_shardings(json.dumps(other).encode(), "_sharding") == {"a": {"type": "PositionalSharding"}}


def test_axis_types_that_are_all_auto_are_written_but_not_kept_as_notes():
    note = {"type": "NamedSharding", "mesh": {"x": 2, "y": 1}, "spec": ["x"], "devices": [0, 1]}
    encoded = encode_shardings({"a": note})
    assert encoded == encode_shardings({"a": {**note, "axis_types": ["Auto", "Auto"]}})
    (document,) = json.loads(encoded).values()
    assert json.loads(document)["axis_types"] == ["AxisType.Auto", "AxisType.Auto"]
    assert parse_shardings(encoded, "_sharding") == {"a": note}


@pytest.mark.filterwarnings("ignore")  # warnings of Orbax and JAX about each other
def test_orbax_reads_shardings_of_ckptcore():
    import jax
    from orbax.checkpoint._src.metadata.sharding import from_serialized_string

    axis_types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("x",), axis_types=axis_types, devices=jax.devices()[:1])
    note = {"type": "NamedSharding", "mesh": {"x": 1}, "spec": [["x"], None], "devices": [0], "axis_types": ["Auto"]}
    (text,) = json.loads(encode_shardings({"a": note})).values()
    spec = jax.sharding.PartitionSpec(("x",), None)
    assert from_serialized_string(text).to_jax_sharding() == jax.sharding.NamedSharding(mesh, spec)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=6) | st.sampled_from(["a", "a/b", "a/b/c", "~0", "~", "a~1b"]), st.text(max_size=4)
    )
)
def test_a_string_is_found_by_its_name_or_reported_as_missing(strings):
    parsed = Strings(encode_strings(strings), "_strings.json")
    for name, text in strings.items():
        try:
            assert parsed.text(name) == text
        except CorruptCheckpointError:
            shorter = any(name.startswith(f"{other}/") for other in strings)
            assert shorter or "~" in name


@pytest.mark.parametrize(
    "value", [True, False, 0, -1, 2**53, -(2**63), 2**64 - 1, 0.0, -0.0, 1.5, math.inf, math.nan], ids=repr
)
def test_scalars_are_stored_as_arrays_and_read_again(value):
    record = value_record(value)
    array = value_array(record)
    assert array.ndim == 0
    assert scalar_record(array, "x") == record
    assert value_text(record) is None
    assert value_type(record) == "scalar"


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, "x", "\ud800", ""], ids=repr)
def test_values_that_no_array_can_hold_are_stored_as_text(value):
    record = value_record(value)
    assert value_array(record) is None
    assert value_text(record).encode() is not None
    assert value_type(record) == "string"


def test_none_is_stored_as_neither_an_array_nor_text():
    record = value_record(None)
    assert (value_array(record), value_text(record), value_type(record)) == (None, None, "None")
    assert value_record(object()) is None


@pytest.mark.parametrize("array", [np.zeros(1), np.asarray("x"), np.asarray(None, object), np.asarray(b"x")], ids=repr)
def test_arrays_that_are_not_scalars_are_refused(array):
    with pytest.raises(CorruptCheckpointError, match="'step'"):
        scalar_record(array, "step")


@pytest.mark.parametrize("kind", ["bool", "int", "float", "complex", "bytes"])
@pytest.mark.parametrize("value", [None, "zz", [], [1], {}, True], ids=repr)
def test_records_with_invalid_values_are_refused(kind, value):
    if (kind, value) == ("bool", True):
        return
    with pytest.raises(CorruptCheckpointError, match=kind):
        value_array(ValueRecord(kind, value))


def packed(code, value):
    return msgpack.packb({"a": msgpack.ExtType(code, msgpack.packb(value))})


@pytest.mark.parametrize(
    "data",
    [
        packed(1, [[2**40, 2**40], "float32", b"1234"]),
        packed(1, [[-1], "float32", b"1234"]),
        packed(1, [["x"], "float32", b"1234"]),
        packed(1, [[1] * 65, "float32", b"1234"]),
        packed(1, 5),
        packed(2, [1]),
        packed(2, ["a", "b"]),
        packed(4, 5),
        packed(9, []),
        msgpack.packb({"a": {"__msgpack_chunked_array__": True, "shape": {"0": 5}, "chunks": {}}}),
        msgpack.packb({"a": {"__msgpack_chunked_array__": True, "shape": {"0": 5}, "chunks": {"0": 1}}}),
        msgpack.packb({b"a": 1}),
        msgpack.packb({1.5: 1}),
        b"\xdf\xff\xff\xff\xff",
        b"\xc1",
        b"",
        b"\x91" * 700 + b"\x01",
        msgpack.packb(msgpack.Timestamp(1, 2)),
    ],
    ids=range(18),
)
def test_hostile_msgpack_is_refused(data):
    with pytest.raises(CorruptCheckpointError, match="checkpoint"):
        parse_aggregate(data, "checkpoint")


def test_deeply_nested_extensions_are_refused():
    data = msgpack.packb(1)
    for _ in range(400):
        data = msgpack.packb([msgpack.ExtType(4, data)])
    with pytest.raises(CorruptCheckpointError, match="nested"):
        parse_aggregate(data, "checkpoint")


def test_the_error_of_an_unknown_dtype_names_it():
    (leaf,) = parse_aggregate(packed(1, [[1], "float7", b"1"]), "checkpoint").leaves
    error = unreadable_error(leaf.value)
    assert isinstance(error, UnsupportedLeafError) and "float7" in str(error)


@settings(deadline=None)
@given(st.binary(max_size=40), st.integers(0, 200))
def test_any_bytes_of_msgpack_are_read_or_refused(noise, position):
    whole = packed(1, [[2, 3], "int8", b"123456"]) + b""
    at = position % len(whole)
    try:
        parse_aggregate(whole[:at] + noise + whole[at + len(noise) :], "checkpoint")
    except CheckpointError as error:
        assert str(error)


def test_the_chunks_of_an_array_are_joined():
    from orbax.checkpoint import msgpack_utils

    array = np.arange(10, dtype=np.float32).reshape(2, 5)
    chunked = {
        "__msgpack_chunked_array__": True,
        "shape": {"0": 2, "1": 5},
        "chunks": {"0": array.reshape(-1)[:6], "1": array.reshape(-1)[6:]},
    }
    tree = parse_aggregate(msgpack_utils.msgpack_serialize({"w": chunked}), "checkpoint")
    (leaf,) = tree.leaves
    np.testing.assert_array_equal(leaf.embedded, array)
    assert leaf.spec == ArraySpec((2, 5), "float32")


def test_trees_that_are_too_deep_are_refused():
    keys = [{"key": "a", "key_type": 2}] * 300
    entry = {"key_metadata": keys, "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False}}
    with pytest.raises(CorruptCheckpointError, match="containers"):
        parse_tree(json.dumps({"tree_metadata": {"x": entry}}).encode(), "_METADATA")


def test_a_list_with_gaps_is_a_dict_with_int_keys():
    def entry(*keys):
        described = [{"key": str(key), "key_type": 1 if isinstance(key, int) else 2} for key in keys]
        return {"key_metadata": described, "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False}}

    def skeleton(*ways):
        table = {str(way): entry(*way) for way in ways}
        return parse_tree(json.dumps({"tree_metadata": table}).encode(), "_METADATA").tree.skeleton

    assert skeleton((2,), (0,)).keys == (0, 2)
    assert skeleton((2,), (0,)).kind == "dict"
    assert skeleton((1,), (0,)).kind == "list"
    with pytest.raises(CorruptCheckpointError, match="one leaf"):
        skeleton((0,), (0, "a"))


def test_handlers_of_objects_that_write_files_are_recorded(tmp_path):
    class Files:
        def save(self, directory):
            (directory / "data.json").write_text("[1]")

        def load(self, directory):
            raise AssertionError

    layout = OcdbtLayout(handlers={"config": "a.b.Handler"})
    ckptcore.save_checkpointables(tmp_path / "c", {"config": Files()}, layout=layout)
    document = json.loads((tmp_path / "c/_CHECKPOINT_METADATA").read_text())
    assert document["item_handlers"] == {"config": "a.b.Handler"}
    assert (tmp_path / "c/orbax.checkpoint").exists()
    ckptcore.save_checkpointables(tmp_path / "d", {"config": Files(), "state": {"x": 1}}, layout=layout)
    document = json.loads((tmp_path / "d/_CHECKPOINT_METADATA").read_text())
    assert document["item_handlers"] == {"config": "a.b.Handler", "state": PYTREE_HANDLER}
