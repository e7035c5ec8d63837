"""Write the golden checkpoints in this directory with Orbax, Flax and tensorstore.

Run this program by hand. The tests only read the checkpoints.

    python generate.py [name ...]

Each golden checkpoint has a directory, and a JSON file of the same name that describes its contents:

    {"directory": directory of the checkpoint in the golden, or "file": its file,
     "tree": result of `ckptcore.load`, if the checkpoint is one tree or has a default tree,
     "checkpointables": {name: result of `ckptcore.load_checkpointables`}, if there are several,
     "custom": the user's metadata, "metrics": metrics of the step}

Values are JSON. Types that JSON lacks are objects with one key that begins with ``$``:

    {"$array": [dtype, shape, start]}  the numbers start, start + 1, ... in C order, modulo 100
    {"$key": [implementation, data]}   JAX's random keys; an array of uint32
    {"$tuple": [...]}                  a tuple, if the file preserves it
    {"$scalar": [dtype, number]}       a NumPy scalar
    {"$complex": [real, imaginary]}    a complex number
    {"$bytes": hexadecimal digits}     bytes
"""

from __future__ import annotations

import collections
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax
import flax.serialization
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from flax.training import checkpoints
from google.protobuf import struct_pb2, text_format
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import msgpack_utils
from orbax.checkpoint._src.metadata.pytree_metadata_options import PyTreeMetadataOptions
from orbax.checkpoint._src.serialization import ocdbt_utils
from orbax.checkpoint._src.serialization import tensorstore_utils as ts_utils
from orbax.checkpoint.experimental import v1

HERE = Path(__file__).resolve().parent
MADE: dict[str, Any] = {}


def golden(function: Any) -> Any:
    """Register a function that writes a golden checkpoint to a path, and returns its description."""
    MADE[function.__name__] = function
    return function


def array(dtype: str, shape: tuple[int, ...] = (), start: int = 1) -> dict[str, Any]:
    return {"$array": [dtype, list(shape), start]}


def numbers(dtype: str, shape: list[int], start: int) -> np.ndarray:
    size = int(np.prod(shape, dtype=np.int64))
    return ((np.arange(size) + start) % 100).astype(jnp.dtype(dtype)).reshape(shape)


def built(value: Any, place: Any = jnp.asarray) -> Any:
    """Return the value that a JSON value describes."""
    if isinstance(value, dict) and len(value) == 1 and next(iter(value)).startswith("$"):
        ((tag, content),) = value.items()
        if tag == "$array":
            return place(numbers(*content))
        if tag == "$key":
            return jax.random.wrap_key_data(jnp.asarray(content[1], jnp.uint32), impl=content[0])
        if tag == "$tuple":
            return tuple(built(child, place) for child in content)
        raise ValueError(tag)
    if isinstance(value, dict):
        return {key: built(child, place) for key, child in value.items()}
    if isinstance(value, list):
        return [built(child, place) for child in value]
    return value


PARAMS: dict[str, Any] = {
    "params": {
        "dense": {"bias": array("float32", (4,)), "kernel": array("float32", (3, 4), 7)},
        "scale": array("bfloat16", (5,)),
    },
    "step": array("int32"),
}


SEPARATE: dict[str, Any] = {**PARAMS, "values": array("float32", (64, 40), 3)}


@golden
def v1_default(path: Path) -> Any:
    v1.save(path, built(PARAMS), custom_metadata={"run": "golden", "seed": 3})
    return {"tree": PARAMS, "custom": {"run": "golden", "seed": 3}}


@golden
def v1_leaves(path: Path) -> Any:
    """Write every type of leaf and container that Orbax supports."""
    tree = {
        "arrays": {
            name: array(name, (2, 3))
            for name in (
                "bool",
                "int8",
                "uint16",
                "int32",
                "float16",
                "bfloat16",
                "float32",
                "complex64",
                "float8_e4m3fn",
                "int4",
            )
        },
        "empty": {"dict": {}, "list": [], "none": None},
        "key": {"$key": ["threefry2x32", [0, 7]]},
        "keys": {"$key": ["rbg", [[1, 2, 3, 4], [5, 6, 7, 8]]]},
        "list": [array("float32", (2,)), [array("int32", (1,), 5), "nested"]],
        "scalars": {"flag": True, "int": 41, "negative": -3, "float": 0.5},
        "text": {"name": "größe", "with/slash": "a", "with.dot": "b"},
        "zero_d": array("float32"),
    }
    v1.save(path, built(tree))
    return {"tree": tree}


@golden
def v1_root_leaf(path: Path) -> Any:
    """Write a tree that is one array, whose name is empty."""
    tree = array("float32", (2, 3), 4)
    v1.save(path, built(tree))
    return {"tree": tree}


@golden
def v1_optimizer(path: Path) -> Any:
    """Write named tuples of optax. Orbax loads them as dicts, and empty ones as None."""
    adam = collections.namedtuple("ScaleByAdamState", ["count", "mu"])  # as in user code
    empty = collections.namedtuple("EmptyState", [])  # as in user code
    count, mu = array("int32", (), 5), {"w": array("float32", (3,))}
    v1.save(path, {"opt": ((adam(built(count), built(mu)), empty()), empty())})
    return {"tree": {"opt": [[{"count": count, "mu": mu}, None], None]}}


@golden
def v1_numpy(path: Path) -> Any:
    """Write NumPy arrays with dtypes of 64 bits. Orbax stores the tuple as a list, and the int keys as text."""
    tree = {
        "float64": array("float64", (3,)),
        "int64": array("int64", (2, 2)),
        "layers": {"0": array("float32", (2,)), "10": array("float32", (2,), 3)},
        "pair": [array("uint8", (4,)), 5],
    }
    saved = built(tree, np.asarray)
    saved["layers"] = {int(key): value for key, value in saved["layers"].items()}
    saved["pair"] = tuple(saved["pair"])
    v1.save(path, saved)
    return {"tree": tree}


@golden
def v1_composite(path: Path) -> Any:
    ema = {"w": array("float32", (6,), 9)}
    config = {"layers": [1, 2], "name": "small", "rate": 0.1, "none": None, "on": True}
    v1.save_checkpointables(path, {"state": built(PARAMS), "ema": built(ema), "config": config})
    return {"checkpointables": {"state": PARAMS, "ema": ema, "config": config}, "tree": PARAMS}


def _options(**saving: Any) -> v1.Context:
    return v1.Context(array_options=v1.options.ArrayOptions(saving=v1.options.ArrayOptions.Saving(**saving)))


@golden
def v1_zarr3_plain(path: Path) -> Any:
    """Write uncompressed arrays of zarr 3, each in its own directory."""
    with _options(use_ocdbt=False, use_zarr3=True, use_compression=False):
        v1.save(path, built(PARAMS))
    return {"tree": PARAMS}


@golden
def v1_zarr2(path: Path) -> Any:
    with _options(use_ocdbt=True, use_zarr3=False):
        v1.save(path, built(PARAMS))
    return {"tree": PARAMS}


def _mesh(**sizes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))


@golden
def v1_sharded(path: Path) -> Any:
    """Write arrays of four devices, with read chunks.

    They are sharded along one or two axes, by both mesh axes along one array axis, or replicated.
    """
    tree = {
        "columns": array("float32", (8, 8)),
        "rows": array("float32", (8, 4)),
        "tiles": array("int32", (4, 4)),
        "whole": array("float32", (8,)),
    }
    mesh = _mesh(data=2, model=2)
    specs = {"columns": (None, "model"), "rows": (("data", "model"),), "tiles": ("data", "model"), "whole": ()}
    state = {
        name: jax.device_put(built(leaf), NamedSharding(mesh, PartitionSpec(*specs[name])))
        for name, leaf in tree.items()
    }
    options = v1.options.ArrayOptions.Saving.StorageOptions(chunk_byte_size=32)
    with _options(storage_options=options, use_replica_parallel=True, min_slice_bytes_for_replica_parallel=1):
        v1.save(path, state)
    return {"tree": tree}


PROCESSES = """
import sys
from pathlib import Path
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
sys.argv = sys.argv[:1]
sys.path.insert(0, {here!r})
import generate
generate.{function}(Path({path!r}))
"""
SHARED = {"columns": array("float32", (4, 8)), "same": array("int32", (3,), 4), "rows": array("float32", (8, 2), 11)}


def save_from_processes(path: Path) -> None:
    """Save in one of two processes, which have two devices each."""
    v1.save(path, shared_state())


def shared_state() -> Any:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"columns": (None, "x"), "same": (), "rows": ("x",)}
    state = {}
    for name, leaf in SHARED.items():
        whole = numbers(*leaf["$array"])
        sharding = NamedSharding(mesh, PartitionSpec(*specs[name]))
        state[name] = jax.make_array_from_callback(whole.shape, sharding, lambda index, whole=whole: whole[index])
    return state


def flax_from_processes(path: Path) -> None:
    """Save in one of two processes with Flax without Orbax, which writes a directory of shared arrays and a file."""
    flax.config.update("flax_use_orbax_checkpointing", False)
    state = {**shared_state(), "epoch": 3, "own": np.arange(4)}
    manager = GlobalAsyncCheckpointManager()
    checkpoints.save_checkpoint_multiprocess(path, state, 10, gda_manager=manager)
    manager.wait_until_finished()


def _run_processes(path: Path, function: str) -> None:
    program = PROCESSES.format(here=str(HERE), path=str(path), function=function)
    environment = dict(os.environ, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    running = [
        subprocess.Popen([sys.executable, "-c", program, "localhost:23917", str(rank)], env=environment)
        for rank in range(2)
    ]
    for process in running:
        if process.wait(timeout=120) != 0:
            raise RuntimeError("a process failed")


@golden
def v1_processes(path: Path) -> Any:
    _run_processes(path, "save_from_processes")
    return {"tree": SHARED}


@golden
def flax_processes(path: Path) -> Any:
    path.mkdir()
    _run_processes(path, "flax_from_processes")
    return {"file": "checkpoint_10", "tree": {**SHARED, "epoch": 3, "own": array("int64", (4,), 0)}}


@golden
def flax_file(path: Path) -> Any:
    """Write a run of `flax.training.checkpoints` without Orbax, in which each step is a file."""
    flax.config.update("flax_use_orbax_checkpointing", False)
    for step in (5, 10):
        optimizer = {"0": {"count": array("int32", (), step), "mu": {"w": array("float32", (40, 30), step)}}, "1": {}}
        tree = {
            "params": {"w": array("bfloat16", (5,)), "b": array("float32", (40, 30), 7)},
            "opt_state": optimizer,
            "step": step,
            "name": "größe",
            "none": None,
            "scalar": {"$scalar": ["float32", 1.5]},
        }
        state = {**built({key: tree[key] for key in ("params", "step", "name", "none")}), "scalar": np.float32(1.5)}
        inner = built(optimizer["0"])
        state["opt_state"] = (inner, {})
        checkpoints.save_checkpoint(path, state, step, keep=2)
    return {"file": "checkpoint_10", "tree": tree}


@golden
def flax_bytes(path: Path) -> Any:
    """Write one array with `flax.serialization.to_bytes`, to a file with any name."""
    path.mkdir()
    (path / "weights").write_bytes(flax.serialization.to_bytes(numbers("float32", [3, 400], 2)))
    return {"file": "weights", "tree": array("float32", (3, 400), 2)}


@golden
def v1_separate_nodes(path: Path) -> Any:
    """Write nodes to ``ocdbt_meta`` and values to ``ocdbt_data``, with an option of two internal functions of Orbax."""
    for function in (ts_utils.ArrayWriteSpec.__init__, ocdbt_utils.merge_ocdbt_per_process_files):
        function.__kwdefaults__["store_ocdbt_metadata_and_values_separately"] = True
    try:
        with _options(use_compression=False):
            v1.save(path, built(SEPARATE))
    finally:
        for function in (ts_utils.ArrayWriteSpec.__init__, ocdbt_utils.merge_ocdbt_per_process_files):
            function.__kwdefaults__["store_ocdbt_metadata_and_values_separately"] = False
    return {"tree": SEPARATE}


@golden
def v1_partial(path: Path) -> Any:
    first, second = {"a": array("float32", (3,))}, {"b": {"c": array("int32", (2, 2), 6)}}
    v1.partial.save(path, built(first))
    v1.partial.save(path, built(second))
    v1.partial.finalize(path)
    return {"tree": {**first, **second}}


@golden
def training(path: Path) -> Any:
    """Write a directory of steps with `training.Checkpointer`."""
    with v1.training.Checkpointer(path, custom_metadata={"project": "golden"}) as checkpointer:
        checkpointer.save(3, built(PARAMS), metrics={"loss": 0.25}, custom_metadata={"note": "third"})
    return {"directory": "3", "tree": PARAMS, "metrics": {"loss": 0.25}, "custom": {"note": "third"}}


@golden
def v0_standard(path: Path) -> Any:
    """Write arrays of zarr 2 in OCDBT, which was the default of Orbax."""
    tree = {**PARAMS, "empty": {}, "none": None, "count": 12, "key": {"$key": ["threefry2x32", [3, 4]]}}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, built(tree))
        checkpointer.wait_until_finished()
    return {"tree": tree}


@golden
def v0_pytree_plain(path: Path) -> Any:
    """Write arrays of zarr 2, each in its own directory."""
    checkpointer = ocp.PyTreeCheckpointer(use_ocdbt=False)
    checkpointer.save(path, built({**PARAMS, "name": "plain"}))
    checkpointer.close()
    return {"tree": {**PARAMS, "name": "plain"}}


@golden
def v0_zarr3(path: Path) -> Any:
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True))
    checkpointer.save(path, args=ocp.args.PyTreeSave(built(PARAMS), custom_metadata={"item": 1}))
    checkpointer.close()
    return {"tree": PARAMS, "custom": {"item": 1}}


@golden
def v0_without_metadata(path: Path) -> Any:
    """Write a checkpoint without `_METADATA`, as old versions did. Names of directories describe the tree."""
    v0_pytree_plain(path)
    for name in ("_METADATA", "_CHECKPOINT_METADATA", "_strings.json", "commit_success.txt"):
        (path / name).unlink(missing_ok=True)
    return {"tree": PARAMS}


@golden
def v0_rich_types(path: Path) -> Any:
    """Write tuples and named tuples with the option that preserves their types."""
    pair = collections.namedtuple("Pair", ["mu", "nu"])  # as in user code
    handler = ocp.PyTreeCheckpointHandler(pytree_metadata_options=PyTreeMetadataOptions(support_rich_types=True))
    checkpointer = ocp.Checkpointer(handler)
    mu, nu, first = array("float32", (2,)), array("float32", (3,), 4), array("int32", (2,), 8)
    checkpointer.save(
        path,
        args=ocp.args.PyTreeSave(
            {
                "opt": (pair(built(mu), built(nu)), ()),
                "plain": {"x": built(first)},
                "list": [built(first), (built(mu),)],
            }
        ),
    )
    checkpointer.close()
    return {
        "tree": {
            "list": [first, {"$tuple": [mu]}],
            "opt": {"$tuple": [{"mu": mu, "nu": nu}, {"$tuple": []}]},
            "plain": {"x": first},
        }
    }


@golden
def v0_items(path: Path) -> Any:
    """Write a composite with a tree, JSON, an array and random keys, like programs with Flax or MaxText."""
    config = {"name": "maxtext", "sizes": [1, 2.5, None], "deep": {"on": False}}
    key = jnp.asarray([0, 42], jnp.uint32)
    message = struct_pb2.Value(string_value="text of a message")
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(
            path,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(built(PARAMS)),
                config=ocp.args.JsonSave(config),
                mask=ocp.args.ArraySave(jnp.arange(1, 7, dtype=jnp.int32)),
                rng=ocp.args.JaxRandomKeySave(jax.random.wrap_key_data(key)),
                message=ocp.args.ProtoSave(message),
            ),
        )
    members = {
        "params": PARAMS,
        "config": config,
        "mask": array("int32", (6,)),
        "rng": {"$key": ["threefry2x32", [0, 42]]},
        "message": text_format.MessageToString(message),
    }
    return {"checkpointables": members, "tree": PARAMS}


GENERATOR = {
    "bit_generator": "MT19937",
    "gauss": 0.25,
    "has_gauss": 1,
    "state": {"key": array("uint32", (624,)), "pos": 7},
}
GENERATOR_TUPLE = {"$tuple": ["MT19937", array("uint32", (624,)), 7, 1, 0.25]}
MESSAGE = struct_pb2.Value(string_value="text of a message")


def _alone(path: Path, handler: Any, args: Any) -> None:
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=args)


@golden
def v0_array(path: Path) -> Any:
    """Write one array, which Orbax stores in a dict."""
    _alone(path, ocp.ArrayCheckpointHandler(), ocp.args.ArraySave(jnp.arange(1, 7, dtype=jnp.int32)))
    return {"tree": array("int32", (6,))}


@golden
def v0_array_named(path: Path) -> Any:
    """Write a number under a name that the program chose."""
    _alone(path, ocp.ArrayCheckpointHandler("count"), ocp.args.ArraySave(41))
    return {"tree": 41}


@golden
def v0_json(path: Path) -> Any:
    _alone(path, ocp.JsonCheckpointHandler(), ocp.args.JsonSave({"name": "small", "sizes": [1, None]}))
    return {"tree": {"name": "small", "sizes": [1, None]}}


@golden
def v0_json_named(path: Path) -> Any:
    _alone(path, ocp.JsonCheckpointHandler("settings"), ocp.args.JsonSave({"name": "small"}))
    return {"tree": {"name": "small"}}


@golden
def v0_proto(path: Path) -> Any:
    _alone(path, ocp.ProtoCheckpointHandler(filename="message"), ocp.args.ProtoSave(MESSAGE))
    return {"tree": text_format.MessageToString(MESSAGE)}


@golden
def v0_jax_key(path: Path) -> Any:
    key = jax.random.wrap_key_data(jnp.asarray([0, 42], jnp.uint32))
    _alone(path, ocp.handlers.JaxRandomKeyCheckpointHandler(), ocp.args.JaxRandomKeySave(key))
    return {"tree": {"$key": ["threefry2x32", [0, 42]]}}


@golden
def v0_numpy_key(path: Path) -> Any:
    """Write the state of a NumPy generator in its older form, under a name that the program chose."""
    state = built(GENERATOR_TUPLE, np.asarray)
    _alone(path, ocp.handlers.NumpyRandomKeyCheckpointHandler("numpy"), ocp.args.NumpyRandomKeySave(state))
    return {"tree": GENERATOR_TUPLE}


@golden
def v0_handlers(path: Path) -> Any:
    """Write one checkpoint with every handler of Orbax."""
    raw = jnp.asarray([0, 7], jnp.uint32)
    config = {"name": "small"}
    arguments = ocp.args.Composite(
        array=ocp.args.ArraySave(np.arange(1, 7, dtype=np.int64)),
        number=ocp.args.ArraySave(0.5),
        json=ocp.args.JsonSave(config),
        proto=ocp.args.ProtoSave(MESSAGE),
        key=ocp.args.JaxRandomKeySave(jax.random.wrap_key_data(raw)),
        named_key=ocp.args.JaxRandomKeySave(jax.random.wrap_key_data(raw)),
        raw_key=ocp.args.JaxRandomKeySave(raw),
        generator=ocp.args.NumpyRandomKeySave(built(GENERATOR, np.asarray)),
        old_generator=ocp.args.NumpyRandomKeySave(built(GENERATOR_TUPLE, np.asarray)),
        pytree=ocp.args.PyTreeSave(built({"checkpoint": array("int32", (2,))})),
        state=ocp.args.StandardSave(built(PARAMS)),
    )
    handlers = {
        "array": ocp.ArrayCheckpointHandler(),
        "number": ocp.ArrayCheckpointHandler(),
        "json": ocp.JsonCheckpointHandler(),
        "proto": ocp.ProtoCheckpointHandler(),
        "key": ocp.handlers.JaxRandomKeyCheckpointHandler(),
        "named_key": ocp.handlers.JaxRandomKeyCheckpointHandler("jax"),
        "raw_key": ocp.handlers.JaxRandomKeyCheckpointHandler(),
        "generator": ocp.handlers.NumpyRandomKeyCheckpointHandler(),
        "old_generator": ocp.handlers.NumpyRandomKeyCheckpointHandler("numpy"),
        "pytree": ocp.PyTreeCheckpointHandler(),
        "state": ocp.StandardCheckpointHandler(),
    }
    _alone(path, ocp.CompositeCheckpointHandler(**handlers), arguments)
    members = {
        "array": array("int64", (6,)),
        "number": 0.5,
        "json": config,
        "proto": text_format.MessageToString(MESSAGE),
        "key": {"$key": ["threefry2x32", [0, 7]]},
        "named_key": {"$key": ["threefry2x32", [0, 7]]},
        "raw_key": {"$key": [None, [0, 7]]},
        "generator": GENERATOR,
        "old_generator": GENERATOR_TUPLE,
        "pytree": {"checkpoint": array("int32", (2,))},
        "state": PARAMS,
    }
    return {"checkpointables": members, "tree": PARAMS}


@golden
def manager_array(path: Path) -> Any:
    """Write a directory of steps with `CheckpointManager`. The item of the step is an array and not a tree."""
    with ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(step_prefix="model")) as checkpoints:
        checkpoints.save(100, args=ocp.args.ArraySave(jnp.arange(1, 5, dtype=jnp.float32)))
        checkpoints.wait_until_finished()
    return {"directory": "model_100", "tree": array("float32", (4,))}


@golden
def manager(path: Path) -> Any:
    """Write a directory of steps with `CheckpointManager`, with metrics."""
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(path, options=options, metadata={"project": "old"}) as checkpoints:
        checkpoints.save(
            7,
            args=ocp.args.StandardSave(built(PARAMS)),
            metrics={"loss": 1.5, "rank": 2},
            custom_metadata={"note": "seventh"},
        )
        checkpoints.wait_until_finished()
    return {"directory": "7", "tree": PARAMS, "metrics": {"loss": 1.5, "rank": 2}, "custom": {"note": "seventh"}}


@golden
def manager_items(path: Path) -> Any:
    extra = {"order": [3, 1]}
    with ocp.CheckpointManager(path) as checkpoints:
        checkpoints.save(
            1, args=ocp.args.Composite(state=ocp.args.PyTreeSave(built(PARAMS)), extra=ocp.args.JsonSave(extra))
        )
        checkpoints.wait_until_finished()
    return {"directory": "1", "checkpointables": {"state": PARAMS, "extra": extra}, "tree": PARAMS}


@golden
def numbered_manifest(path: Path) -> Any:
    """Write a checkpoint whose database has numbered manifests, as on some file systems."""
    v1_zarr2(path)
    state = path / "state"
    source = ts.KvStore.open({"driver": "ocdbt", "base": state.as_uri() + "/"}).result()
    entries = {key: source[key] for key in source.list().result()}
    (state / "manifest.ocdbt").unlink()
    shutil.rmtree(state / "d")
    shutil.rmtree(state / "ocdbt.process_0")
    target = ts.KvStore.open(
        {
            "driver": "ocdbt",
            "base": state.as_uri() + "/",
            "config": {"manifest_kind": "numbered", "max_inline_value_bytes": 0},
        }
    ).result()
    for key, value in entries.items():
        target[key] = value
    return {"tree": PARAMS}


def _aggregate(path: Path, tree: Any) -> None:
    path.write_bytes(msgpack_utils.msgpack_serialize(tree))


@golden
def legacy_msgpack(path: Path) -> Any:
    """Write one msgpack file with small values, and directories with arrays."""
    v0_pytree_plain(path)
    for name in ("_METADATA", "_CHECKPOINT_METADATA", "_strings.json", "_sharding", "commit_success.txt"):
        (path / name).unlink(missing_ok=True)
    shutil.rmtree(path / "array_metadatas", ignore_errors=True)
    small = {"bf": array("bfloat16", (3,)), "mean": array("float32", (2, 2), 5)}
    _aggregate(
        path / "checkpoint",
        {
            "params": {
                "dense": {"bias": "PLACEHOLDER://params.dense.bias", "kernel": "PLACEHOLDER://params.dense.kernel"},
                "scale": "PLACEHOLDER://params.scale",
            },
            "step": "PLACEHOLDER://step",
            "small": {name: np.asarray(built(leaf)) for name, leaf in small.items()},
            "epoch": 4,
            "rate": 0.5,
            "name": "old",
            "none": None,
            "list": {"0": 1, "1": 2},
            "scalar": np.float32(1.5),
            "complex": 1 + 2j,
        },
    )
    tree = {
        **PARAMS,
        "small": small,
        "epoch": 4,
        "rate": 0.5,
        "name": "old",
        "none": None,
        "list": {"0": 1, "1": 2},
        "scalar": {"$scalar": ["float32", 1.5]},
        "complex": {"$complex": [1.0, 2.0]},
    }
    return {"tree": tree}


@golden
def flax_msgpack(path: Path) -> Any:
    """Write only the msgpack file, as Flax did with a handler of Orbax."""
    path.mkdir()
    tree = {"params": {"w": array("float32", (2, 3))}, "step": 9}
    _aggregate(path / "checkpoint", {"params": {"w": np.asarray(built(tree["params"]["w"]))}, "step": 9})
    return {"tree": tree}


@golden
def axlearn(path: Path) -> Any:
    """Write a step of AXLearn: an index in JSON, arrays of zarr 2, and the state of an iterator in msgpack."""
    step = path / "step_00000004"
    arrays = {
        "model/decoder/emb/weight": array("float32", (8, 4)),
        "model/decoder/norm/scale": array("bfloat16", (4,), 2),
        "learner/count": array("int32", (), 4),
        "prng_key": array("uint32", (4,), 1),
    }
    index: list[Any] = [["step", 4]]
    for name, leaf in arrays.items():
        dtype, shape, start = leaf["$array"]
        whole = numbers(dtype, shape, start)
        index.append([name, {"dtype": dtype, "shape": str(tuple(shape))}])
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": str(step / "gda" / name) + "/"},
            "metadata": {
                "shape": shape,
                "chunks": [max(1, extent // 2) for extent in shape],
                "compressor": {"id": "zstd", "level": 1},
            },
            "dtype": dtype,
        }
        ts.open(spec, create=True).result().write(whole).result()
    index.append(["input_iter", "<class 'axlearn.common.input_grain._GrainIterator'>"])
    state = {"position": 17, "shard": {"index": 0, "name": "a"}, "bytes": b"\x00\x01", "list": [1, "x", None]}
    (step / "python_0").mkdir(parents=True)
    (step / "python_0" / "input_iter").write_bytes(msgpack.packb(state))
    (step / "index").write_text(json.dumps(index))
    tree: dict[str, Any] = {"step": 4}
    for name, leaf in arrays.items():
        inner = tree
        *parents, last = name.split("/")
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = leaf
    tree["input_iter"] = {**state, "bytes": {"$bytes": "0001"}}
    return {"directory": "step_00000004", "tree": tree}


def main(names: list[str]) -> None:
    """Write the golden checkpoints with these names, or all of them."""
    for name in names or MADE:
        path = HERE / name
        shutil.rmtree(path, ignore_errors=True)
        content = MADE[name](path)
        for file in path.rglob("commit_success.txt"):
            file.write_text("Checkpoint commit was successful")  # Orbax writes a path of this machine to the file
        (HERE / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
        print(name, sum(file.stat().st_size for file in path.rglob("*") if file.is_file()), "bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
