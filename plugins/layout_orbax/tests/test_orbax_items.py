"""Inspection of golden checkpoints of Orbax, Flax and AXLearn. It reads no arrays."""

import json
import shutil
from pathlib import Path

import pytest
from ckptcore_orbax.orbax.aggregate import is_aggregate
from ckptcore_orbax.orbax.axlearn import find_axlearn
from ckptcore_orbax.orbax.composites import find_composite
from ckptcore_orbax.orbax.items import find_item
from ckptcore_orbax.orbax.trees import tree_of_names
from ckptcore_testing.hostile_json import tampered
from ckptcore_testing.layout_stores import DirectoryReadStore

from ckptcore.errors import CheckpointError, CorruptCheckpointError, UncommittedCheckpointError
from ckptcore.model import Attribute, Node
from ckptcore.protocols import StorageAddress

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.json") if "file" not in json.loads(path.read_text()))


def expected_of(name):
    return json.loads((GOLDEN / f"{name}.json").read_text())


def store_of(name):
    return DirectoryReadStore(GOLDEN / name / expected_of(name).get("directory", ""))


def trees_of(name):
    """Return the trees in a golden checkpoint by the names of checkpointables. The default tree has the name None."""
    store = store_of(name)
    trees = {}
    if (step := find_axlearn(store)) is not None:
        return {None: step.tree}
    if (item := find_item(store)) is not None:
        trees[None] = item.tree
    if (composite := find_composite(store)) is not None:
        trees |= {member: find_item(store, member).tree for member in composite.members}
        if composite.default_tree is not None:
            trees[None] = trees[composite.default_tree]
    return trees


def assert_describes(skeleton, leaves, expected):
    """Assert that a tree has the containers of the JSON, and the values that are known without reading arrays."""
    if isinstance(expected, dict) and len(expected) == 1 and next(iter(expected)).startswith("$"):
        ((tag, content),) = expected.items()
        if tag == "$tuple":
            assert skeleton.kind == "tuple"
            assert len(skeleton.children) == len(content)
            for child, inner in zip(skeleton.children, content, strict=True):
                assert_describes(child, leaves, inner)
            return
        leaf = next(leaves)
        if tag in ("$array", "$key", "$scalar"):
            assert leaf.value is None
        if tag == "$scalar":
            assert leaf.embedded.dtype == content[0]
            assert leaf.embedded == content[1]
        return
    if isinstance(expected, dict | list):
        assert isinstance(skeleton, Node), expected
        keys = [key.name if isinstance(key, Attribute) else key for key in skeleton.keys]
        if isinstance(expected, list):
            assert skeleton.kind == "list"
            expected = dict(enumerate(expected))
        assert sorted(keys) == sorted(expected)
        for key, child in zip(keys, skeleton.children, strict=True):
            assert_describes(child, leaves, expected[key])
        return
    assert not isinstance(skeleton, Node)
    leaf = next(leaves)
    if leaf.value_type == "scalar":
        assert leaf.value is None  # the value is in an array
    else:
        assert leaf.value.value == expected
        assert leaf.value.kind == ("none" if expected is None else type(expected).__name__)


@pytest.mark.parametrize("name", NAMES)
def test_trees_of_golden_checkpoints_have_their_expected_structure(name):
    expected = expected_of(name)
    trees = trees_of(name)
    for member, tree in expected.get("checkpointables", {}).items():
        leaves = iter(trees[member].leaves)
        assert_describes(trees[member].skeleton, leaves, tree)
        assert next(leaves, None) is None
    leaves = iter(trees[None].leaves)
    assert_describes(trees[None].skeleton, leaves, expected["tree"])
    assert next(leaves, None) is None
    assert set(expected.get("checkpointables", {})) <= set(trees)


@pytest.mark.parametrize("name", NAMES)
def test_metrics_and_metadata_of_golden_checkpoints_are_read(name):
    expected = expected_of(name)
    composite = find_composite(store_of(name))
    if composite is None:
        assert "checkpointables" not in expected
        assert "metrics" not in expected
        return
    assert composite.metrics == expected.get("metrics", {})
    assert composite.custom == expected.get("custom", {})
    assert composite.created.endswith("+00:00")
    assert composite.default_tree in composite.members


def test_records_contain_random_keys_and_shardings():
    item = find_item(DirectoryReadStore(GOLDEN / "v1_leaves"), "state")
    leaves = {leaf.name: leaf for leaf in item.tree.leaves}
    from ckptcore.model import ArraySpec

    record = item.record(leaves["keys"], ArraySpec((2, 4), "uint32"))
    assert record.kind == "jax.key"
    assert record.notes == {"impl": "rbg", "sharding": {"type": "SingleDeviceSharding", "device": "cpu:0"}}
    assert item.record(leaves["zero_d"], ArraySpec((), "float32")).kind == "array"
    sharded = find_item(DirectoryReadStore(GOLDEN / "v1_sharded"), "state")
    leaves = {leaf.name: leaf for leaf in sharded.tree.leaves}
    assert sharded.record(leaves["rows"], ArraySpec((8, 4), "float32")).notes["sharding"] == {
        "type": "NamedSharding",
        "mesh": {"data": 2, "model": 2},
        "spec": [["data", "model"]],
        "devices": [0, 1, 2, 3],
    }


def test_kinds_of_members_and_the_storage_of_their_arrays():
    composite = find_composite(store_of("v0_items"))
    assert composite.members == {
        "config": "json",
        "mask": "array",
        "message": "proto",
        "params": "tree",
        "rng": "random key",
    }
    rng = find_item(store_of("v0_items"), "rng")
    assert (rng.directory, rng.random_keys) == ("rng/jax_random_key", {"checkpoint": "threefry2x32"})
    for name, directory, database, zarr_format in [
        ("v1_default", "state", True, 3),
        ("v1_zarr3_plain", "state", False, 3),
        ("v1_zarr2", "state", True, 2),
        ("v0_pytree_plain", "", False, 2),
        ("v0_zarr3", "", True, 3),
        ("v0_without_metadata", "", False, 2),
        ("v0_items", "mask", False, 2),
    ]:
        item = find_item(store_of(name), directory)
        assert (item.database, item.zarr_format) == (database, zarr_format), name
    assert find_item(store_of("v0_zarr3")).custom == {"item": 1}


def test_a_directory_of_steps_is_not_a_checkpoint():
    for name in ("manager", "training"):
        root = DirectoryReadStore(GOLDEN / name)
        assert find_composite(root) is None
        assert find_item(root) is None


def test_a_directory_of_flat_steps_is_not_a_composite(tmp_path):
    for step in ("100", "200"):
        shutil.copytree(GOLDEN / "v0_standard", tmp_path / step)
    assert find_composite(DirectoryReadStore(tmp_path)) is None
    for step in ("100", "200"):
        (tmp_path / step / "_CHECKPOINT_METADATA").unlink()
    assert find_composite(DirectoryReadStore(tmp_path)) is None


def test_a_composite_without_markers_is_recognized_by_its_members(tmp_path):
    shutil.copytree(GOLDEN / "manager_items" / "1", tmp_path / "step")
    (tmp_path / "step" / "_CHECKPOINT_METADATA").unlink()
    composite = find_composite(DirectoryReadStore(tmp_path / "step"))
    assert (composite.members, composite.default_tree) == ({"extra": "json", "state": "tree"}, "state")


@pytest.mark.parametrize(
    ("data", "name", "expected"),
    [
        (b"\x82\xa6params\x80\xa4step\x01", "checkpoint_1", True),
        (b"\xde\x00\x10\xa1a", "x", True),
        (b"\x81\xd9\x20" + b"n" * 32 + b"\xc0", "x", True),
        (b"\xc7\x12\x01\x93\x91\x03", "x", True),
        (b"\x03", "model.msgpack", True),
        (b"", "x", False),
        (b"\x80\x02}q\x00.", "pickle", False),
        (b"\x80\x04\x95", "pickle", False),
        (b"\x89PNG\r\n\x1a\n", "x.png", False),
        (b"\x89HDF\r\n\x1a\n", "x.h5", False),
        (b"PK\x03\x04", "x.zip", False),
        (b'{"a": 1}', "x.json", False),
        ("größe".encode(), "notes", False),
        (b"\xff\xfea\x00", "utf-16", False),
        (b"\x81\xa4\x00\x01\x02\x03\xc0", "x", False),
    ],
)
def test_a_msgpack_tree_is_recognized_by_its_first_bytes(data, name, expected):
    assert is_aggregate(data, name) is expected


def test_optional_files_may_be_missing(tmp_path):
    state = shutil.copytree(GOLDEN / "v1_default" / "state", tmp_path / "state")
    (state / "_sharding").unlink()
    shutil.rmtree(state / "array_metadatas")
    item = find_item(DirectoryReadStore(tmp_path), "state")
    assert (item.shardings, item.random_keys) == ({}, {})
    assert len(item.tree.leaves) == 4
    (state / "_METADATA").unlink()
    item = find_item(DirectoryReadStore(tmp_path), "state")
    assert (item.tree, item.database) == (None, True)


def test_a_member_whose_deletion_began_is_ignored(tmp_path):
    path = shutil.copytree(GOLDEN / "v1_composite", tmp_path / "c")
    (path / "_CHECKPOINT_DELETION").write_text('{"checkpointable_name": "ema"}')
    assert list(find_composite(DirectoryReadStore(path)).members) == ["config", "state"]
    (path / "_CHECKPOINT_DELETION").write_text('{"checkpoin')
    with pytest.raises(CorruptCheckpointError, match="_CHECKPOINT_DELETION"):
        find_composite(DirectoryReadStore(path))


def test_directories_that_are_not_members_are_ignored(tmp_path):
    path = shutil.copytree(GOLDEN / "v1_composite", tmp_path / "c")
    shutil.copytree(path / "ema", path / "ema2.orbax-checkpoint-tmp-17")
    (path / "logs").mkdir()
    (path / "logs" / "events.log").write_text("x")
    assert list(find_composite(DirectoryReadStore(path)).members) == ["config", "ema", "state"]


def test_a_member_that_only_other_software_reads_is_listed(tmp_path):
    path = shutil.copytree(GOLDEN / "v1_composite", tmp_path / "c")
    (path / "iterator").mkdir()
    (path / "iterator" / "position.bin").write_text("x")
    document = json.loads((path / "_CHECKPOINT_METADATA").read_text())
    document["item_handlers"]["iterator"] = "grain.GrainHandler"
    (path / "_CHECKPOINT_METADATA").write_text(json.dumps(document))
    assert find_composite(DirectoryReadStore(path)).members["iterator"] == "other"
    assert find_item(DirectoryReadStore(path), "iterator") is None


def test_a_temporary_directory_is_reported_as_uncommitted(tmp_path):
    path = shutil.copytree(GOLDEN / "v1_default", tmp_path / "5.orbax-checkpoint-tmp")
    with pytest.raises(UncommittedCheckpointError, match="temporary"):
        find_composite(DirectoryReadStore(path))


def test_databases_that_were_not_merged_are_reported_as_uncommitted(tmp_path):
    path = shutil.copytree(GOLDEN / "v1_default", tmp_path / "c")
    (path / "state" / "manifest.ocdbt").unlink()
    with pytest.raises(UncommittedCheckpointError, match="merged"):
        find_item(DirectoryReadStore(path), "state")


class OnGcs(DirectoryReadStore):
    @property
    def address(self):
        return StorageAddress("gs://bucket/5/")


@pytest.mark.parametrize("name", ["v1_default", "v0_standard"])
def test_a_checkpoint_on_gcs_without_its_commit_file_is_uncommitted(tmp_path, name):
    path = shutil.copytree(GOLDEN / name, tmp_path / "5")
    assert find_composite(OnGcs(path)) or find_item(OnGcs(path))
    (path / "commit_success.txt").unlink()
    with pytest.raises(UncommittedCheckpointError, match=r"commit_success\.txt"):
        assert find_composite(OnGcs(path)) or find_item(OnGcs(path))
    assert find_composite(DirectoryReadStore(path)) or find_item(DirectoryReadStore(path))


def test_other_directories_are_not_recognized_as_checkpoints(tmp_path):
    store = DirectoryReadStore(tmp_path)
    assert (find_composite(store), find_item(store), find_axlearn(store)) == (None, None, None)
    (tmp_path / "index").write_text("not json")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text("x")
    assert (find_composite(store), find_item(store), find_axlearn(store)) == (None, None, None)


def test_names_of_arrays_form_a_nested_tree_or_one_dict():
    tree = tree_of_names(["a.b", "a.c.0", "d"], "here")
    assert tree.skeleton.keys == ("a", "d")
    assert [leaf.name for leaf in tree.leaves] == ["a.b", "a.c.0", "d"]
    tree = tree_of_names(["a.b", "a", "d"], "here")
    assert tree.skeleton.keys == ("a", "a.b", "d")
    with pytest.raises(CorruptCheckpointError, match="no leaf"):
        tree_of_names([], "here")


def test_leaves_that_share_a_name_are_marked():
    from ckptcore_orbax.orbax.tree_file import parse_tree

    def entry(*keys):
        return {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }

    table = {"1": entry("a.b"), "2": entry("a", "b"), "3": entry("c")}
    tree = parse_tree(json.dumps({"tree_metadata": table}).encode(), "_METADATA").tree
    assert [(leaf.name, leaf.shared) for leaf in tree.leaves] == [("a.b", True), ("a.b", True), ("c", False)]


FILES = [
    ("v1_leaves", "state/_METADATA"),
    ("v1_sharded", "state/_METADATA"),
    ("v1_sharded", "state/_sharding"),
    ("v1_leaves", "state/_strings.json"),
    ("v1_leaves", "state/array_metadatas/process_0"),
    ("v1_default", "_CHECKPOINT_METADATA"),
    ("v0_rich_types", "_METADATA"),
    ("v0_items", "config/metadata"),
    ("v0_items", "rng/jax_random_key_metadata/metadata"),
    ("v0_array", "_CHECKPOINT_METADATA"),
    ("manager", "7/metrics/metrics"),
    ("axlearn", "step_00000004/index"),
]


def inspect_checkpoint(path):
    store = DirectoryReadStore(path)
    composite = find_composite(store)
    members = list(composite.members) if composite else [""]
    return composite, [find_item(store, member) for member in members], find_axlearn(store)


@pytest.mark.parametrize(("name", "file"), FILES)
def test_a_hostile_file_raises_only_checkpoint_errors(tmp_path, name, file):
    path = shutil.copytree(GOLDEN / name, tmp_path / "c")
    root = path / expected_of(name).get("directory", "")
    target = path / file
    document = json.loads(target.read_text())
    outcomes = set()
    for changed in tampered(document, 120):
        target.write_text(json.dumps(changed))
        try:
            inspect_checkpoint(root)
            outcomes.add("read")
        except CheckpointError as error:
            outcomes.add("refused")
            assert str(error)
    assert "refused" in outcomes or file == "config/metadata"  # this file may contain any JSON


@pytest.mark.parametrize(("name", "file"), [*FILES, ("legacy_msgpack", "checkpoint")])
def test_a_truncated_file_is_refused(tmp_path, name, file):
    path = shutil.copytree(GOLDEN / name, tmp_path / "c")
    root = path / expected_of(name).get("directory", "")
    target = path / file
    data = target.read_bytes()
    for length in {1, len(data) // 2, len(data) - 1}:
        target.write_bytes(data[:length])
        with pytest.raises(CorruptCheckpointError) as raised:
            inspect_checkpoint(root)
        assert file.rpartition("/")[2] in str(raised.value)


def test_an_empty_metadata_file_is_ignored(tmp_path):
    path = shutil.copytree(GOLDEN / "v1_default", tmp_path / "c")
    (path / "_CHECKPOINT_METADATA").write_bytes(b"")
    composite = find_composite(DirectoryReadStore(path))
    assert (list(composite.members), composite.custom, composite.created) == (["state"], {}, None)


@pytest.mark.parametrize("step", ["gda/../../x", "/etc/passwd", "a//b", "."])
def test_paths_of_axlearn_that_lead_outside_are_refused(tmp_path, step):
    path = shutil.copytree(GOLDEN / "axlearn" / "step_00000004", tmp_path / "c")
    index = [["step", 4], [step, {"dtype": "float32", "shape": "(2,)"}]]
    (path / "index").write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpointError, match="relative path"):
        find_axlearn(DirectoryReadStore(path))
