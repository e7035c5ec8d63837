"""Options of Orbax's Context. The replacement implements them, or refuses them with a reason."""

import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from ckptcore_integrations import orbax_v1 as ours
from orbax.checkpoint import pathways
from orbax.checkpoint import v1 as theirs

import ckptcore
from ckptcore.errors import InvalidLocationError, SaveLostError
from tests.ownership.killed_owner import leave_lease

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")


def context_with(option, value):
    context = ours.Context()
    *groups, name = option.split(".")
    holder = context
    for group in groups:
        holder = getattr(holder, group)
    setattr(holder, name, value)
    return context


@pytest.mark.parametrize(
    ("option", "value", "layout"),
    [
        ("array.saving.use_ocdbt", False, "zarr3"),
        ("array.saving.use_zarr3", False, "ocdbt"),
        ("array.saving.use_compression", False, "ocdbt"),
        ("array.saving.ocdbt_target_data_file_size", 0, "ocdbt"),
        ("memory.write_concurrent_bytes", 1 << 20, "ocdbt"),
        ("array.saving.storage_options.chunk_byte_size", 1024, "ocdbt"),
    ],
)
def test_options_of_formats_are_used(tmp_path, option, value, layout):
    array = jnp.arange(1024.0).reshape(32, 32)
    with context_with(option, value):
        ours.save(tmp_path / "c", {"w": array})
        for loader in (theirs, ours):
            np.testing.assert_array_equal(loader.load(tmp_path / "c")["w"], array)
    assert ckptcore.metadata(tmp_path / "c/state").layout == layout
    if option.endswith("chunk_byte_size"):
        assert np.prod(theirs.metadata(tmp_path / "c").metadata["w"].storage_metadata.chunk_shape) * 4 == value


def test_dtypes_and_chunks_are_chosen_by_key(tmp_path):
    def choose(key, value):
        if "small" in jax.tree_util.keystr(key):
            return ours.options.ArrayOptions.Saving.StorageOptions(dtype=jnp.bfloat16, chunk_byte_size=64)
        return None

    context = context_with("array.saving.scoped_storage_options_creator", choose)
    context.array.saving.storage_options.dtype = jnp.float16
    with context:
        ours.save(tmp_path / "c", {"small": jnp.ones(64), "large": jnp.ones(64)})
    metadata = theirs.metadata(tmp_path / "c").metadata
    assert metadata["small"].dtype == jnp.bfloat16 and metadata["small"].storage_metadata.chunk_shape == (32,)
    assert metadata["large"].dtype == jnp.float16 and metadata["large"].storage_metadata.chunk_shape == (64,)


def test_padding_and_partial_loads_are_allowed_by_options(tmp_path):
    ours.save(tmp_path / "c", {"w": jnp.arange(4.0), "b": jnp.ones(2)})
    wider = {"w": jax.ShapeDtypeStruct((6,), jnp.float32)}
    context = context_with("array.loading.enable_padding_and_truncation", True)
    context.pytree.loading.partial_load = True
    with pytest.raises(ValueError, match="User-provided restore item"):
        ours.load(tmp_path / "c", wider)
    with context:
        for loader in (theirs, ours):
            assert loader.load(tmp_path / "c", wider)["w"].tolist() == [0, 1, 2, 3, 0, 0]


@pytest.mark.parametrize("mode", ours.options.AtomicityMode)
def test_readers_in_every_atomicity_mode_accept_every_save(tmp_path, mode):
    with context_with("atomicity.mode", mode):
        ours.save(tmp_path / "c", {"w": jnp.ones(2)})
    assert (tmp_path / "c" / "commit_success.txt").exists()
    for reading in ours.options.AtomicityMode:
        with context_with("atomicity.mode", reading):
            assert theirs.load(tmp_path / "c")["w"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("multiprocessing.primary_host", None),
        ("multiprocessing.active_processes", {7}),
        ("file.path_permission_mode", 0o750),
        ("memory.is_prioritized_key_fn", lambda key: True),
        ("memory.serialization_status_callback", object()),
        ("array.saving.enable_write_sharding_file", False),
        ("array.saving.array_metadata_store", None),
        ("array.saving.storage_options.shard_axes", (0,)),
        ("checkpoint_layout", "safetensors"),
    ],
)
def test_an_unsupported_option_is_refused_with_a_reason(tmp_path, option, value):
    name = option.rpartition(".")[2]
    with context_with(option, value), pytest.raises(NotImplementedError, match=rf"{name}.*[:=].*\. |{name}"):
        ours.save(tmp_path / "c", {"w": jnp.ones(2)})
    assert not (tmp_path / "c").exists()


def test_an_implementation_for_pathways_is_ignored_without_pathways(tmp_path, monkeypatch):
    """Tunix and MaxText always set an implementation for Pathways."""
    context = context_with("pathways.checkpointing_impl", pathways.CheckpointingImpl.NO_DISPATCHER)
    with context:
        ours.save(tmp_path / "c", {"w": jnp.ones(2)})
        assert ours.load(tmp_path / "c")["w"].tolist() == [1, 1]
    monkeypatch.setattr(ours.multihost, "is_pathways_backend", lambda: True)
    with context, pytest.raises(NotImplementedError, match="checkpointing_impl: ckptcore moves data"):
        ours.save(tmp_path / "d", {"w": jnp.ones(2)})


@pytest.mark.filterwarnings("ignore:Use `.*` instead:DeprecationWarning")
def test_the_options_that_maxtext_sets(tmp_path):
    context = ours.Context()
    context.array.saving.use_ocdbt = True
    context.array.saving.use_zarr3 = True
    context.array.saving.ocdbt_target_data_file_size = 2 << 30
    context.array.saving.storage_options.chunk_byte_size = 2 << 30
    context.memory.write_concurrent_bytes = context.memory.read_concurrent_bytes = 96 * 10**9
    context.asynchronous.timeout_secs = 3600
    context.array.loading.use_load_and_broadcast = True
    context.array.loading.load_and_broadcast_options.replica_axis_index = 0
    context.array.loading.load_and_broadcast_options.broadcast_memory_limit_bytes = 10**9
    context.pathways.checkpointing_impl = pathways.CheckpointingImpl.NO_DISPATCHER
    context.pytree.loading.partial_load = True
    state = {"params": {"w": jnp.arange(4.0)}, "step": 7}
    policy = ours.training.save_decision_policies.FixedIntervalPolicy(2)
    kept = ours.training.preservation_policies.LatestN(2)
    with ours.training.Checkpointer(
        tmp_path, context=context, save_decision_policy=policy, preservation_policy=kept
    ) as run:
        for step in range(7):
            run.save_async(step, state, custom_metadata={"step": step})
    with theirs.training.Checkpointer(tmp_path) as run:
        assert [checkpoint.step for checkpoint in run.checkpoints] == [4, 6]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "fsdp"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    with context:
        loaded = ours.load_pytree(
            tmp_path / "6", {"params": {"w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding)}}
        )
    assert loaded["params"]["w"].tolist() == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:Use `.*` instead:DeprecationWarning")
def test_files_of_safetensors_are_loaded(tmp_path):
    safetensors.numpy.save_file({"w": np.arange(6, dtype=np.float32)}, tmp_path / "model.safetensors")
    with ours.Context(checkpoint_layout=ours.options.CheckpointLayout.SAFETENSORS):
        metadata = ours.pytree_metadata(tmp_path).metadata
        assert (metadata["w"].shape, metadata["w"].dtype) == ((6,), np.float32)
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = {"w": jax.ShapeDtypeStruct((6,), jnp.float32, sharding=sharding)}
        assert ours.load_pytree(tmp_path, abstract)["w"].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_context_belongs_to_its_thread(tmp_path):
    def save(name):
        ours.save(tmp_path / name, {"w": jnp.ones(2)})

    with context_with("array.saving.use_ocdbt", False):
        thread = threading.Thread(target=save, args=("there",))
        thread.start()
        thread.join()
        save("here")
    assert not json.loads((tmp_path / "here/state/_METADATA").read_text())["use_ocdbt"]
    assert json.loads((tmp_path / "there/state/_METADATA").read_text())["use_ocdbt"]


def test_leftovers_of_killed_saves_are_removed_on_request(tmp_path):
    left = tmp_path / ".7.0123456789abcdef.ckptcore"
    for removes in (False, True):
        left.mkdir(exist_ok=True)
        (left / "file").touch()
        with ours.training.Checkpointer(tmp_path, cleanup_tmp_directories=removes) as checkpointer:
            checkpointer.save(int(removes), {"w": jnp.zeros(3)})
        assert left.exists() != removes
    with theirs.training.Checkpointer(tmp_path) as checkpointer:
        assert [checkpoint.step for checkpoint in checkpointer.checkpoints] == [0, 1]


def test_the_home_directory(tmp_path, monkeypatch):
    """Orbax expands neither ``~`` nor variables, so it would create directories with these names."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path))
    state = {"w": np.arange(3.0)}
    ours.save("~/c", state)
    ours.save_checkpointables_async("~/d", {"state": state}).result()
    ours.partial.save("~/e", state)
    ours.partial.finalize("~/e")
    for name in "cde":
        assert ours.is_orbax_checkpoint(f"~/{name}")
        np.testing.assert_array_equal(ours.load(f"~/{name}")["w"], state["w"])
        np.testing.assert_array_equal(ours.load_checkpointables(path=f"~/{name}")["state"]["w"], [0, 1, 2])
        assert ours.metadata(f"~/{name}").metadata["w"].shape == (3,)
        assert "state" in ours.checkpointables_metadata(f"~/{name}").metadata
    assert ours.delete("~/d")
    with ours.training.Checkpointer("~/run") as checkpointer:
        checkpointer.save(1, state)
        assert str(checkpointer.directory) == str(tmp_path / "run")
    with pytest.raises(InvalidLocationError, match="expandvars"):
        ours.training.Checkpointer("$NOWHERE/run")
    assert {path.name for path in tmp_path.iterdir()} == {"c", "e", "run", "work"}
    assert not list((tmp_path / "work").iterdir())


def test_leftovers_are_removed_without_locks_after_the_lease_expires(tmp_path, monkeypatch):
    killed = leave_lease(tmp_path, monkeypatch.setattr)
    with ours.training.Checkpointer(tmp_path, cleanup_tmp_directories=True) as checkpointer:
        checkpointer.save(1, {"w": jnp.zeros(3)})
    with pytest.raises(SaveLostError):
        killed.check()
