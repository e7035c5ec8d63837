"""Orbax loads checkpoints that ckptcore saved with all layouts and options. Both versions of Orbax load them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from ckptcore_orbax import OcdbtLayout, Zarr3Layout, ZarrLayout
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1

import ckptcore
from plugins.layout_orbax.tests.orbax_states import (
    FEW,
    LAYOUTS,
    STATES,
    Iterator,
    abstract_of,
    assert_same,
    host,
    seen_by_orbax,
    sharded_state,
)

pytestmark = [
    # These tests load without shardings, of which Orbax warns.
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
    # If a load of Orbax fails, its other tasks outlive their event loop.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CUSTOM = {"run": "a", "nested": {"seed": 3, "list": [1, 2.5, None, True]}}


def described_state():
    """Return a state whose metadata Orbax can read. Orbax fails for all trees with a Python bool, including its own."""
    state = STATES["jax"]()
    state["values"] = {name: value for name, value in state["values"].items() if not isinstance(value, bool)}
    return {name: leaf for name, leaf in state.items() if name not in ("key", "keys")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that saves a state in a layout, once for each pair, and returns its location."""
    made = {}

    def save(layout, state, item=None):
        key = layout, state, item
        if key not in made:
            made[key] = tmp_path_factory.mktemp("saved") / "checkpoint"
            options = LAYOUTS[layout] if item is None else {"ocdbt": OcdbtLayout, "zarr": ZarrLayout}[layout](item=item)
            value = described_state() if state == "described" else STATES[state]()
            ckptcore.save(made[key], value, layout=options, metadata=CUSTOM)
        return made[key]

    return save


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_version_1_loads_every_bit(saved, layout, state):
    assert_same(v1.load(saved(layout, state)), seen_by_orbax(STATES[state]()))


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_version_1_loads_every_bit_of_a_partial_save(layout, state, tmp_path):
    """Each of three sessions saves some of the entries, and some of the rows of an array."""
    whole = STATES[state]()
    tied = np.arange(30.0, dtype=np.float32).reshape(5, 6)
    whole |= {"tied": {"first": tied, "second": tied}, "boxes": np.arange(48, dtype=np.int16).reshape(12, 4)}
    for session in range(3):
        given = {name: child for place, (name, child) in enumerate(whole.items()) if place % 3 == session}
        if "arrays" in whole:
            given["arrays"] = dict(list(whole["arrays"].items())[session::3])
        rows = slice(4 * session, 4 * session + 4)
        given["boxes"] = ckptcore.ShardedArray.part(whole["boxes"][rows], (rows.start, 0), (12, 4), cuts=((4, 8), ()))
        ckptcore.partial(tmp_path / "saved", layout=LAYOUTS[layout]).save(given)
    ckptcore.partial(tmp_path / "saved", layout=LAYOUTS[layout]).finalize()
    assert_same(v1.load(tmp_path / "saved"), seen_by_orbax(whole))


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("layout", FEW)
def test_version_1_loads_the_tree_as_a_checkpointable(saved, layout, state):
    loaded = v1.load_checkpointables(saved(layout, state))
    assert list(loaded) == ["state"]
    assert_same(loaded["state"], seen_by_orbax(STATES[state]()))


@pytest.mark.parametrize("layout", FEW)
def test_version_1_loads_into_an_abstract_tree(saved, layout):
    """The abstract tree has a mesh of eight devices, an omitted leaf, and Python values."""
    expected = STATES["jax"]()
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    everywhere = NamedSharding(mesh, PartitionSpec())
    cut = NamedSharding(mesh, PartitionSpec(None, None, "y"))
    asked = abstract_of(
        seen_by_orbax(expected), lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)
    )
    asked["large"] = jax.ShapeDtypeStruct((5, 3, 4), jnp.float32, sharding=cut)
    asked["zero_d"] = v1.PLACEHOLDER
    loaded = v1.load(saved(layout, "jax"), asked)
    assert loaded["large"].sharding == cut
    assert loaded["arrays"]["int8"].sharding == everywhere
    assert loaded.pop("zero_d") is v1.PLACEHOLDER
    assert_same(loaded, {name: child for name, child in seen_by_orbax(expected).items() if name != "zero_d"})


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("layout", FEW)
def test_version_1_loads_into_arrays_of_numpy(saved, layout, state):
    """States of all frameworks load. Random keys load as their data."""
    expected = host(seen_by_orbax(STATES[state]()))
    asked = abstract_of(expected, lambda leaf: np.empty(leaf.shape, leaf.dtype))
    assert_same(v1.load(saved(layout, state), asked), expected)


def test_version_1_casts_to_the_dtypes_of_the_abstract_tree(saved):
    asked = abstract_of(host(seen_by_orbax(STATES["jax"]())), lambda leaf: np.empty(leaf.shape, leaf.dtype))
    asked["large"] = jax.ShapeDtypeStruct((5, 3, 4), jnp.bfloat16)
    loaded = v1.load(saved("ocdbt", "jax"), asked)
    assert_same(loaded["large"], jnp.arange(60, dtype=jnp.bfloat16).reshape(5, 3, 4))


@pytest.mark.parametrize("layout", FEW)
def test_version_1_reads_the_metadata(saved, layout):
    """The metadata has the shape, dtype, sharding and chunks of each array."""
    metadata = v1.metadata(saved(layout, "described"))
    assert metadata.custom_metadata == CUSTOM
    assert 0 < metadata.init_timestamp_nsecs <= metadata.commit_timestamp_nsecs
    tree = metadata.metadata
    for dtype, leaf in seen_by_orbax(described_state())["arrays"].items():
        assert (tree["arrays"][dtype].shape, tree["arrays"][dtype].dtype) == (leaf.shape, leaf.dtype)
    assert tree["large"].sharding_metadata.to_jax_sharding() == jnp.ones(1).sharding
    assert tree["large"].storage_metadata.write_shape == (5, 3, 4)
    assert (tree["values"]["int"], tree["values"]["float"], tree["values"]["text"]) == (0, 0.0, "string")
    assert tree["empty"]["dict"] == {}


@pytest.mark.parametrize("layout", FEW)
def test_version_1_loads_into_its_own_metadata(saved, layout):
    location = saved(layout, "described")
    assert_same(v1.load(location, v1.metadata(location).metadata), seen_by_orbax(described_state()))


def test_version_0_reads_the_metadata(saved):
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.metadata(saved("ocdbt", "jax") / "state").item_metadata.tree
    assert (tree["large"].shape, tree["large"].dtype) == ((5, 3, 4), np.float32)
    assert (tree["values"]["true"].shape, tree["values"]["true"].dtype) == ((), np.bool_)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("layout", FEW)
@pytest.mark.parametrize("reader", [ocp.StandardCheckpointer, ocp.PyTreeCheckpointer])
def test_version_0_loads_the_item(saved, layout, state, reader):
    with reader() as checkpointer:
        assert_same(checkpointer.restore(saved(layout, state) / "state"), seen_by_orbax(STATES[state]()))


@pytest.mark.parametrize("layout", ["ocdbt", "zarr"])
@pytest.mark.parametrize("reader", [ocp.StandardCheckpointer, ocp.PyTreeCheckpointer])
def test_version_0_loads_a_checkpoint_without_items(saved, layout, reader):
    location = saved(layout, "jax", "")
    with reader() as checkpointer:
        assert_same(checkpointer.restore(location), seen_by_orbax(STATES["jax"]()))
    with ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(location)
        assert metadata.custom_metadata == CUSTOM
        assert metadata.item_metadata.tree["large"].shape == (5, 3, 4)
    assert_same(ckptcore.load(location), ckptcore.load(saved(layout, "jax")))


def test_version_0_loads_into_an_abstract_tree(tmp_path):
    state = {name: STATES["jax"]()[name] for name in ("arrays", "large", "key", "keys", "empty")}
    ckptcore.save(tmp_path / "c", state, layout="ocdbt")
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = NamedSharding(mesh, PartitionSpec())
    expected = seen_by_orbax(state)
    asked = abstract_of(expected, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere))
    with ocp.StandardCheckpointer() as checkpointer:
        loaded = checkpointer.restore(tmp_path / "c" / "state", asked)
    assert_same(loaded, expected)
    assert loaded["large"].sharding == everywhere


@pytest.mark.parametrize("item", ["default", "params"])
def test_an_item_of_any_name_loads(saved, item):
    location = saved("ocdbt", "jax", item)
    expected = seen_by_orbax(STATES["jax"]())
    assert_same(v1.load_checkpointables(location)[item], expected)
    assert_same(v1.load(location), expected)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        restored = checkpointer.restore(location, ocp.args.Composite(**{item: ocp.args.StandardRestore()}))
    assert_same(restored[item], expected)


STEP = {"w": jnp.arange(6.0).reshape(2, 3), "key": jax.random.key(1), "count": 3, "empty": {}, "none": None}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that saves three steps with the tree in a given item, and returns their directory."""
    made = {}

    def steps(item):
        if item not in made:
            directory = made[item] = tmp_path_factory.mktemp("run") / "steps"
            with ckptcore.Checkpointer(directory, layout=OcdbtLayout(item=item)) as checkpointer:
                for step in (3, 5, 12):
                    state = {**STEP, "count": step}
                    checkpointer.save(step, state, metrics={"loss": 1 / step}, metadata={"note": step})
        return made[item]

    return steps


def test_the_checkpointer_of_version_1_loads_steps(run):
    with v1.training.Checkpointer(run("state")) as checkpointer:
        assert [step.step for step in checkpointer.checkpoints] == [3, 5, 12]
        assert [step.metrics for step in checkpointer.checkpoints] == [{"loss": 1 / step} for step in (3, 5, 12)]
        assert checkpointer.latest.step == 12
        assert_same(checkpointer.load(), {**STEP, "count": 12})
        assert_same(checkpointer.load(5), {**STEP, "count": 5})
        assert_same(checkpointer.load(3, {**STEP, "w": np.empty((2, 3), np.float32)})["w"], np.asarray(STEP["w"]))
        assert_same(checkpointer.load_checkpointables(3)["state"], {**STEP, "count": 3})
        metadata = checkpointer.metadata(5)
        assert (metadata.metrics, metadata.custom_metadata) == ({"loss": 0.2}, {"note": 5})
        assert metadata.metadata["w"].shape == (2, 3)


def test_the_checkpointer_of_version_1_continues_a_run_of_ckptcore(run, tmp_path):
    """The Checkpointer of Orbax adds and deletes steps, and ckptcore sees these changes."""
    directory = tmp_path / "steps"
    with ckptcore.Checkpointer(directory, layout="ocdbt") as ours:
        ours.save(1, STEP)
        ours.save(2, STEP)
    policy = v1.training.preservation_policies.LatestN(2)
    with v1.training.Checkpointer(directory, preservation_policy=policy) as theirs:
        theirs.save(3, {**STEP, "count": 30})
        assert [step.step for step in theirs.checkpoints] == [2, 3]
    with ckptcore.Checkpointer(directory, layout="ocdbt") as ours:
        assert list(ours.steps) == [2, 3]
        assert_same(ours.load(3)["count"], 30)
        assert_same(ours.load(2)["w"], np.asarray(STEP["w"]))


@pytest.mark.parametrize("args", [ocp.args.StandardRestore, ocp.args.PyTreeRestore])
def test_the_manager_of_version_0_loads_steps(run, args):
    with ocp.CheckpointManager(run("default")) as manager:
        assert list(manager.all_steps()) == [3, 5, 12]
        assert manager.latest_step() == 12
        assert manager.metrics(3) == {"loss": 1 / 3}
        assert_same(manager.restore(12, args=args()), {**STEP, "count": 12})
        assert manager.metadata(5).custom_metadata == {"note": 5}
        if args is ocp.args.StandardRestore:
            assert_same(manager.restore(5, args=args({**STEP, "w": jnp.zeros((2, 3))})), {**STEP, "count": 5})


def test_the_manager_of_version_0_chooses_the_best_step_by_metrics(run):
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], best_mode="min", read_only=True)
    with ocp.CheckpointManager(run("default"), options=options) as manager:
        assert manager.best_step() == 12


def test_the_manager_of_version_0_loads_named_items(run):
    with ocp.CheckpointManager(run("state")) as manager:
        restored = manager.restore(3, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
        assert_same(restored["state"], {**STEP, "count": 3})


def test_the_manager_of_version_0_needs_no_arguments(run):
    with ocp.CheckpointManager(run("default")) as manager:
        assert_same(manager.restore(5), {**STEP, "count": 5})


@pytest.mark.parametrize("layout", ["ocdbt", "zarr3", "zarr"])
def test_several_checkpointables_load(tmp_path, layout):
    trees = {"model": STEP, "ema": {"w": jnp.ones(3, jnp.bfloat16)}, "options": {"lr": 0.5, "layers": [1, "a"]}}
    location = tmp_path / "checkpoint"
    ckptcore.save_checkpointables(location, trees, layout=layout, metadata=CUSTOM)
    for name, loaded in v1.load_checkpointables(location).items():
        assert_same(loaded, trees[name])
    assert set(v1.load_checkpointables(location)) == set(trees)
    assert_same(v1.load(location, checkpointable_name="ema"), trees["ema"])
    assert v1.checkpointables_metadata(location).custom_metadata == CUSTOM
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        wanted = {name: ocp.args.StandardRestore() for name in trees}
        restored = checkpointer.restore(location, ocp.args.Composite(**wanted))
        for name, tree in trees.items():
            assert_same(restored[name], tree)


def test_objects_that_write_files_load(tmp_path):
    """Orbax passes objects, such as iterators of Grain, the directory in which they saved their files."""
    ckptcore.save_checkpointables(tmp_path / "c", {"model": STEP, "data": Iterator(7)}, layout="ocdbt")
    there = Iterator(0)
    loaded = v1.load_checkpointables(tmp_path / "c", {"model": None, "data": there})
    assert there.position == 7
    assert_same(loaded["model"], STEP)


def test_nodes_and_values_in_different_directories_load(tmp_path):
    """Orbax reads databases with two directories. An overwrite by ckptcore deletes both."""
    large = "x" * 3000
    layout = OcdbtLayout(separate_nodes=True)
    ckptcore.save(tmp_path / "c", {**STEP, "text": large, "values": jnp.arange(2000.0)}, layout=layout)
    assert_same(v1.load(tmp_path / "c"), {**STEP, "text": large, "values": jnp.arange(2000.0)})
    files = {path.parent.name for path in (tmp_path / "c/state").rglob("*") if path.is_file()}
    assert files >= {"ocdbt_meta", "ocdbt_data"}
    assert "d" not in files
    assert ckptcore.verify(tmp_path / "c").ok
    ckptcore.copy(tmp_path / "c", tmp_path / "flat", layout=OcdbtLayout(separate_nodes=True, item=""))
    (tmp_path / "flat" / "checkpoint.json").unlink()  # without the root, ckptcore treats it as a checkpoint of Orbax
    ckptcore.save(tmp_path / "flat", STEP, overwrite=True)
    assert_same(ckptcore.load(tmp_path / "flat")["count"], 3)


@pytest.mark.parametrize("layout", FEW)
def test_tied_arrays_load_under_each_name(tmp_path, layout):
    tied = jnp.arange(2000.0)
    ckptcore.save(tmp_path / "c", {"embed": tied, "head": {"w": tied}, "other": tied + 1}, layout=LAYOUTS[layout])
    loaded = v1.load(tmp_path / "c")
    assert_same(loaded, {"embed": tied, "head": {"w": tied}, "other": tied + 1})
    size = sum(path.stat().st_size for path in (tmp_path / "c").rglob("*") if path.is_file())
    saved_once = layout in ("ocdbt", "ocdbt-zarr2")  # these layouts have few chunks, so additional keys are small
    assert size < 3 * tied.nbytes if saved_once else size > 3 * tied.nbytes


@pytest.mark.parametrize("layout", [*FEW, "ocdbt-zstd", "zarr3-zstd"])
def test_sharded_arrays_load_with_their_saved_shardings(tmp_path, layout):
    state = sharded_state()
    ckptcore.save(tmp_path / "c", state, layout=LAYOUTS[layout])
    loaded = v1.load(tmp_path / "c")
    assert_same(loaded, state)
    for name in state:
        if name == "keys":  # Orbax records the sharding of the data of keys
            continue
        assert loaded[name].sharding.is_equivalent_to(state[name].sharding, state[name].ndim), name
    with ocp.StandardCheckpointer() as checkpointer:
        assert_same(checkpointer.restore(tmp_path / "c" / "state"), state)


def test_sharded_arrays_load_onto_another_mesh(tmp_path):
    state = sharded_state()
    ckptcore.save(tmp_path / "c", state, layout="ocdbt")
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("z",))
    asked = {
        name: jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=NamedSharding(mesh, PartitionSpec("z" if name in ("rows", "tiles") else None)),
        )
        for name, leaf in state.items()
        if leaf.ndim
    }
    asked["scalar"] = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    loaded = v1.load(tmp_path / "c", asked)
    assert_same(loaded, state)
    assert loaded["rows"].sharding == asked["rows"].sharding


@pytest.mark.parametrize(
    "layout", [OcdbtLayout(), OcdbtLayout(chunk_bytes=64), Zarr3Layout(), Zarr3Layout(compression="zstd")]
)
def test_orbax_detects_flipped_bits(tmp_path, layout):
    """Each chunk has a CRC32C, which every reader of zarr v3 verifies."""
    array = jnp.arange(500.0)
    ckptcore.save(tmp_path / "c", {"w": array}, layout=layout)
    assert_same(v1.load(tmp_path / "c"), {"w": array})
    (path,) = [
        path
        for path in (tmp_path / "c" / "state").rglob("*")
        if path.is_file() and ("process" in str(path.parent) if layout.name == "ocdbt" else path.name == "0")
    ]
    whole = path.read_bytes()
    # Stop before the index of the last chunk. Orbax verifies it, too, but its padding bits are unused.
    for position in range(0, 1900 if layout.compression is None else len(whole), 190):
        damaged = bytearray(whole)
        damaged[position] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(Exception, match=r"(?i)checksum|crc|corrupt|decod|decompress"):
            v1.load(tmp_path / "c")
    path.write_bytes(whole)
    assert_same(v1.load(tmp_path / "c"), {"w": array})


@pytest.mark.parametrize("layout", ["ocdbt", "zarr3", "zarr"])
def test_long_lists_of_numbers_load_as_arrays(layout, tmp_path):
    numbers = list(range(5000))
    state = {
        "ints": numbers,
        "floats": tuple(number / 3 for number in numbers),
        "flags": [number % 2 == 0 for number in numbers],
        "dict": {f"a{number}": number for number in numbers},
        "w": np.arange(3),
    }
    ckptcore.save(tmp_path / "c", state, layout=layout)
    with ocp.PyTreeCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "c" / "state")
    assert restored["ints"].dtype == np.int64
    assert restored["ints"].tolist() == state["ints"]
    assert restored["floats"].dtype == np.float64
    assert restored["floats"].tolist() == list(state["floats"])
    assert restored["flags"].tolist() == state["flags"]
    assert json.loads(restored["dict"]) == state["dict"]
    assert restored["w"].tolist() == [0, 1, 2]
    abstract = {"ints": np.zeros(5000, np.int64), "floats": np.zeros(5000), "flags": np.zeros(5000, bool), "dict": "",
                "w": np.zeros(3, int)}  # fmt: skip
    again = v1.load(tmp_path / "c", abstract)
    assert again["ints"].tolist() == state["ints"]
    assert again["dict"] == restored["dict"]
