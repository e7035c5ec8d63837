"""ckptcore loads checkpoints that both versions of Orbax saved with many options. The loads return NumPy
arrays, or fill abstract trees of JAX.
"""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1

import ckptcore
import ckptcore.errors
from plugins.layout_orbax.tests.orbax_states import (
    Iterator,
    abstract_of,
    assert_same,
    by_version_0,
    by_version_1,
    host,
    jax_state,
    numpy_state,
    saving,
    seen_by_orbax,
    sharded_state,
)

pytestmark = [
    # These tests load without shardings, of which Orbax warns.
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def in_pieces(state):
    options = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=16), state)
    return ocp.args.PyTreeSave(state, save_args=options)


WRITERS = {
    "v1": by_version_1(),
    "v1-zarr2": by_version_1(use_zarr3=False),
    "v1-files": by_version_1(use_ocdbt=False),
    "v1-zarr2-files": by_version_1(use_ocdbt=False, use_zarr3=False),
    "v1-plain": by_version_1(use_compression=False),
    "v1-plain-zarr2": by_version_1(use_compression=False, use_zarr3=False),
    "v1-plain-files": by_version_1(use_compression=False, use_ocdbt=False),
    "v1-plain-zarr2-files": by_version_1(use_compression=False, use_ocdbt=False, use_zarr3=False),
    "v1-chunks": by_version_1(storage={"chunk_byte_size": 16}),
    "v1-plain-chunks": by_version_1(storage={"chunk_byte_size": 16}, use_compression=False),
    "v1-small-data": by_version_1(ocdbt_target_data_file_size=100, storage={"chunk_byte_size": 64}),
    "v1-no-shardings": by_version_1(enable_write_sharding_file=False),
    "v0": by_version_0(ocp.StandardCheckpointHandler, ocp.args.StandardSave),
    "v0-pytree": by_version_0(ocp.PyTreeCheckpointHandler, ocp.args.PyTreeSave),
    "v0-files": by_version_0(lambda: ocp.PyTreeCheckpointHandler(use_ocdbt=False), ocp.args.PyTreeSave),
    "v0-zarr3": by_version_0(lambda: ocp.PyTreeCheckpointHandler(use_zarr3=True), ocp.args.PyTreeSave),
    "v0-zarr3-files": by_version_0(
        lambda: ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True), ocp.args.PyTreeSave
    ),
    "v0-chunks": by_version_0(ocp.PyTreeCheckpointHandler, in_pieces),
}
FEW = ("v1", "v1-plain", "v1-plain-zarr2-files", "v1-chunks", "v0", "v0-zarr3-files")


def state_of_jax():
    """Return a state that Orbax itself can load. It has no `uint4`, whose dtype Orbax changes."""
    state = jax_state()
    del state["arrays"]["uint4"]
    return state


def state_of_numpy():
    state = numpy_state()
    del state["empty"], state["arrays"]["uint4"]
    return {**state, "layers": dict(enumerate(state["layers"]))}


STATES = {"jax": state_of_jax, "numpy": state_of_numpy}


def made(state, writer):
    made = STATES[state]()
    if writer == "v0":  # `StandardSave` rejects strings
        made.pop("nested", None)
        made["values"] = {name: value for name, value in made["values"].items() if not isinstance(value, str)}
    return made


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that saves a state with a writer, once for each pair. It returns the location and the state."""
    locations = {}

    def save(writer, state="jax"):
        value = made(state, writer)
        if (writer, state) not in locations:
            locations[writer, state] = tmp_path_factory.mktemp("orbax") / "checkpoint"
            WRITERS[writer](locations[writer, state], value)
        return locations[writer, state], value

    return save


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("writer", WRITERS)
def test_every_bit_loads(saved, writer, state):
    location, expected = saved(writer, state)
    assert_same(ckptcore.load(location), host(seen_by_orbax(expected)))


def onto(sharding):
    return lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


@pytest.mark.parametrize("writer", FEW)
def test_abstract_trees_of_jax_load(saved, writer):
    """The abstract tree requests all eight devices. All leaves are equal, including random keys."""
    location, expected = saved(writer)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    everywhere, cut = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), (None, None, ("y",))))
    asked = abstract_of(expected, onto(everywhere))
    asked["large"] = onto(cut)(expected["large"])
    loaded = ckptcore.load(location, asked)
    assert_same(loaded, expected)
    assert loaded["large"].sharding == cut
    assert loaded["key"].sharding.is_equivalent_to(everywhere, 0)


@pytest.mark.parametrize("writer", FEW)
def test_states_load_into_themselves(saved, writer):
    location, expected = saved(writer)
    assert_same(ckptcore.load(location, expected), expected)


@pytest.mark.parametrize("writer", WRITERS)
def test_the_metadata_describes_every_leaf(saved, writer):
    location, expected = saved(writer)
    metadata = ckptcore.metadata(location)
    in_files = "zarr" if "zarr2" in writer or writer == "v0-files" else "zarr3"
    assert metadata.layout == (in_files if "files" in writer else "ocdbt")
    assert metadata.created is not None
    assert metadata.writer.startswith("Orbax")
    abstract = metadata.abstract
    for dtype, leaf in expected["arrays"].items():
        assert (abstract["arrays"][dtype].shape, abstract["arrays"][dtype].dtype) == (leaf.shape, leaf.dtype)
    assert abstract["values"] == expected["values"]
    assert_same(ckptcore.load(location, abstract), ckptcore.load(location))


@pytest.mark.parametrize("writer", FEW)
@pytest.mark.parametrize("layout", ["safetensors", "ocdbt", "zarr3"])
def test_conversions_keep_every_bit(saved, tmp_path, writer, layout):
    location, expected = saved(writer)
    ckptcore.copy(location, tmp_path / "converted", layout=layout)
    assert_same(ckptcore.load(tmp_path / "converted"), ckptcore.load(location))
    # Orbax stores a tuple as a list, and the conversion keeps the list.
    either = ckptcore.Matching(sequences="either")
    assert_same(ckptcore.load(tmp_path / "converted", expected, matching=either), expected)
    assert ckptcore.verify(tmp_path / "converted").ok
    if layout != "safetensors":
        assert_same(v1.load(tmp_path / "converted"), seen_by_orbax(expected))


def command(*arguments):
    from ckptcore_tools.cli.application import application
    from click.testing import CliRunner

    result = CliRunner().invoke(application, [*map(str, arguments)])
    return result.exit_code, result.output


@pytest.mark.parametrize("writer", FEW)
def test_commands_read_checkpoints_of_orbax(saved, tmp_path, writer):
    location, _ = saved(writer)
    code, text = command("inspect", location)
    assert (code, "float32[5, 3, 4]" in text) == (0, True)
    assert "Orbax" in text
    code, text = command("ls", "--json", location.parent)
    assert code == 0
    assert [entry["layout"] for entry in json.loads(text)["checkpoints"]] == [ckptcore.metadata(location).layout]
    assert command("verify", location)[0] == 0
    assert command("convert", location, tmp_path / "c", "--layout", "safetensors")[0] == 0
    assert command("diff", location, tmp_path / "c")[0] == 0


def placed(mesh, *axes):
    return NamedSharding(mesh, PartitionSpec(*axes))


def test_chunks_along_chosen_axes_load(tmp_path):
    state = {"a": jnp.arange(24.0).reshape(4, 6), "b": jnp.arange(7)}
    with saving(storage={"chunk_byte_size": 32, "shard_axes": (0,)}, use_compression=False):
        v1.save(tmp_path / "c", state)
    assert_same(ckptcore.load(tmp_path / "c"), host(state))


def test_arrays_that_orbax_cast_load_with_their_stored_dtype(tmp_path):
    state = {"a": jnp.arange(24.0).reshape(4, 6), "b": jnp.ones(3, jnp.bfloat16)}
    with saving(storage={"dtype": jnp.bfloat16}):
        v1.save(tmp_path / "c", state)
    assert_same(ckptcore.load(tmp_path / "c"), host({name: leaf.astype(jnp.bfloat16) for name, leaf in state.items()}))
    with pytest.raises(ckptcore.errors.TreeMismatchError, match="bfloat16"):
        ckptcore.load(tmp_path / "c", state)


def test_random_keys_without_metadata_load_as_their_data(tmp_path):
    """Without array metadata, the checkpoint does not record that the array contains keys."""
    key = jax.random.key(7)
    with saving(array_metadata_store=None):
        v1.save(tmp_path / "c", {"key": key})
    assert_same(ckptcore.load(tmp_path / "c"), {"key": np.asarray(jax.random.key_data(key))})


SHARDED = {
    "v1": by_version_1(),
    "v1-plain": by_version_1(use_compression=False),
    "v1-replicas": by_version_1(
        use_replica_parallel=True, min_slice_bytes_for_replica_parallel=1, use_compression=False
    ),
    "v1-chunks": by_version_1(storage={"chunk_byte_size": 16}, use_replica_parallel=False),
    "v1-separate": by_version_1(
        use_replica_parallel=True, min_slice_bytes_for_replica_parallel=1, enable_replica_parallel_separate_folder=True
    ),
    "v0": WRITERS["v0"],
    "v0-files": WRITERS["v0-files"],
}


@pytest.mark.parametrize("writer", SHARDED)
def test_sharded_arrays_load(tmp_path, writer):
    """Sharded arrays load as NumPy arrays, with their own sharding, onto another mesh, and onto one device."""
    state = sharded_state()
    SHARDED[writer](tmp_path / "c", state)
    assert_same(ckptcore.load(tmp_path / "c"), host(state))
    again = ckptcore.load(tmp_path / "c", state)
    assert_same(again, state)
    for name, leaf in state.items():
        assert again[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[2:4]), ("z",))
    for sharding in (placed(mesh, "z"), placed(mesh, None, "z"), jax.sharding.SingleDeviceSharding(jax.devices()[5])):
        fits = {
            name: leaf
            for name, leaf in state.items()
            if sharding.num_devices == 1 or (leaf.ndim >= len(sharding.spec) and leaf.shape != (3,))
        }
        asked = {name: onto(sharding)(leaf) if name in fits else ckptcore.PLACEHOLDER for name, leaf in state.items()}
        loaded = ckptcore.load(tmp_path / "c", asked)
        for name, leaf in fits.items():
            assert_same(loaded[name], leaf, name)
            assert loaded[name].sharding == sharding


ON_ONE_DEVICE = """
import sys, jax, numpy as np, ckptcore
assert len(jax.devices()) == 1
expected = dict(np.load(sys.argv[1]))
for location in sys.argv[2:]:
    abstract = ckptcore.metadata(location).abstract
    asked = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in abstract.items()}
    for loaded, kind in ((ckptcore.load(location), np.ndarray), (ckptcore.load(location, asked), jax.Array)):
        assert set(loaded) == set(expected)
        for name, array in expected.items():
            assert isinstance(loaded[name], kind), (location, name)
            assert np.asarray(loaded[name]).astype(np.float32).tobytes() == array.tobytes(), (location, name)
print(f"loaded {len(sys.argv) - 2}")
"""


@pytest.mark.system
def test_arrays_of_eight_devices_load_on_one(tmp_path):
    """If the abstract tree has no shardings, the load does not use the saved shardings."""
    state = {name: leaf for name, leaf in sharded_state().items() if name != "keys"}
    locations = [tmp_path / name for name in ("v1", "v1-replicas", "v0", "ours")]
    for location in locations[:3]:
        SHARDED[location.name](location, state)
    ckptcore.save(locations[3], state, layout="ocdbt")
    np.savez(tmp_path / "expected.npz", **{name: np.asarray(leaf.astype(jnp.float32)) for name, leaf in state.items()})
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ON_ONE_DEVICE, tmp_path / "expected.npz", *locations],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "loaded 4", done.stderr[-2000:]


MODEL = {"w": jnp.arange(6.0).reshape(2, 3), "key": jax.random.key(1), "steps": [1, jnp.int32(2)], "none": None}


@pytest.fixture(scope="module")
def composite(tmp_path_factory):
    location = tmp_path_factory.mktemp("composite") / "c"
    objects = {"model": MODEL, "data": Iterator(5), "config": {"a": 1, "names": ["x", None]}, "ema": {"w": jnp.ones(3)}}
    v1.save_checkpointables(location, objects, custom_metadata={"run": 2})
    return location


def test_several_checkpointables_load(composite):
    loaded = ckptcore.load_checkpointables(composite)
    assert_same(
        loaded,
        {
            "model": host(MODEL),
            "data": {"position.json": b"5"},
            "config": {"a": 1, "names": ["x", None]},
            "ema": {"w": np.ones(3, np.float32)},
        },
    )
    data = Iterator(0)
    some = ckptcore.load_checkpointables(composite, {"model": MODEL}, into={"data": data})
    assert data.position == 5
    assert some["data"] is data
    assert_same(some["model"], MODEL)
    assert_same(ckptcore.load(composite / "ema"), {"w": np.ones(3, np.float32)})
    metadata = ckptcore.metadata(composite)
    assert set(metadata.checkpointables) == {"model", "data", "config", "ema"}
    assert metadata.custom == {"run": 2}
    with pytest.raises(ckptcore.errors.CompositeCheckpointError, match="load_checkpointables"):
        ckptcore.load(composite)


@pytest.mark.parametrize("layout", ["safetensors", "ocdbt"])
def test_several_checkpointables_are_converted(composite, tmp_path, layout):
    ckptcore.copy(composite, tmp_path / "c", layout=layout)
    assert_same(ckptcore.load_checkpointables(tmp_path / "c"), ckptcore.load_checkpointables(composite))
    assert ckptcore.verify(tmp_path / "c").ok
    assert command("diff", composite, tmp_path / "c")[0] == 0
    if layout == "ocdbt":
        data = Iterator(0)
        loaded = v1.load_checkpointables(tmp_path / "c", {"model": None, "ema": None, "data": data})
        assert data.position == 5
        assert_same(loaded["model"], {**MODEL, "key": jax.random.key(1)})


def test_grain_iterators_load(tmp_path):
    """The test saves an iterator of Grain in the middle of its data."""
    grain = pytest.importorskip("grain")
    data = grain.MapDataset.range(20).shuffle(seed=1).batch(2).to_iter_dataset()
    iterator = iter(data)
    for _ in range(3):
        next(iterator)
    v1.save_checkpointables(tmp_path / "c", {"model": MODEL, "data": iterator})
    again = iter(data)
    ckptcore.load_checkpointables(tmp_path / "c", into={"data": again})
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in iterator]


def test_partial_saves_of_orbax_load(tmp_path):
    for part in ({"a": jnp.ones(3)}, {"b": {"c": jnp.arange(4)}}, {"b": {"d": "text"}}):
        v1.partial.save(tmp_path / "c", part)
    v1.partial.finalize(tmp_path / "c")
    expected = {"a": jnp.ones(3), "b": {"c": jnp.arange(4), "d": "text"}}
    assert_same(ckptcore.load(tmp_path / "c"), host(expected))
    assert_same(ckptcore.load(tmp_path / "c", expected), expected)


def test_partial_saves_that_were_not_finalized_are_refused(tmp_path):
    v1.partial.save(tmp_path / "c", {"a": jnp.ones(3)})
    (unfinished,) = tmp_path.iterdir()
    for location in (tmp_path / "c", unfinished):
        with pytest.raises(
            (ckptcore.errors.UncommittedCheckpointError, ckptcore.errors.CheckpointNotFoundError),
        ):
            ckptcore.load(location)


def test_a_run_of_version_1_is_read(tmp_path):
    with v1.training.Checkpointer(tmp_path / "run") as theirs:
        for step in (1, 3, 11):
            theirs.save(step, {**MODEL, "count": step}, metrics={"loss": 1 / step}, custom_metadata={"note": step})
    with ckptcore.CheckpointReader(tmp_path / "run") as reader:
        assert list(reader.steps) == [1, 3, 11]
        assert_same(reader.load(), host({**MODEL, "count": 11}))
        assert_same(reader.load(3, {**MODEL, "count": 0}), {**MODEL, "count": 3})
        assert dict(reader.metadata(3).metrics) == {"loss": 1 / 3}
        assert reader.metadata(3).custom == {"note": 3}


def test_ckptcore_continues_a_run_of_version_0(tmp_path):
    """ckptcore lists and keeps the steps of the manager, and the manager finds the step that ckptcore adds."""
    # The manager stores metrics only with `best_fn`.
    best = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(tmp_path / "run", options=best) as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave({**MODEL, "count": step}), metrics={"loss": 1 / step})
        manager.wait_until_finished()
    from ckptcore_orbax import OcdbtLayout

    with ckptcore.Checkpointer(tmp_path / "run", layout=OcdbtLayout(item="default")) as ours:
        assert ours.latest == 2
        assert_same(ours.load(2, {**MODEL, "count": 0}), {**MODEL, "count": 2})
        ours.save(3, {**MODEL, "count": 3}, metrics={"loss": 1 / 3})
    with ocp.CheckpointManager(tmp_path / "run", options=best) as manager:
        assert list(manager.all_steps()) == [1, 2, 3]
        for step in (2, 3):
            assert_same(manager.restore(step, args=ocp.args.StandardRestore()), {**MODEL, "count": step})
            assert manager.metrics(step) == {"loss": 1 / step}
