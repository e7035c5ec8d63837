"""Saves and loads under JAX's settings, which are set by context manager, by configuration, and in another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ckptcore_jax.testing import enable_x64, host_memory
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import ckptcore

nnx = pytest.importorskip("flax.nnx")

MESH = jax.make_mesh((8,), ("x",))

CONTEXTS: dict[str, Callable[[], Any]] = {
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "check_tracer_leaks": lambda: jax.checking_leaks(),
    "disable_jit": lambda: jax.disable_jit(True),
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
    "transfer_guard explicit": lambda: jax.transfer_guard("disallow_explicit"),
    "default_device": lambda: jax.default_device(jax.devices()[5]),
    "enable_x64": enable_x64,
    "numpy_rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "numpy_dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    **({"mesh": lambda: jax.set_mesh(MESH)} if hasattr(jax, "set_mesh") else {}),  # not before JAX 0.7
    "default_matmul_precision": lambda: jax.default_matmul_precision("bfloat16"),
    "log_compiles": lambda: jax.log_compiles(True),
}

CONFIGURATION: dict[str, tuple[str, Any]] = {
    "debug_nans": ("jax_debug_nans", True),
    "debug_infs": ("jax_debug_infs", True),
    "check_tracer_leaks": ("jax_check_tracer_leaks", True),
    "disable_jit": ("jax_disable_jit", True),
    "transfer_guard": ("jax_transfer_guard", "disallow"),
    "transfer_guard explicit": ("jax_transfer_guard", "disallow_explicit"),
    "default_device": ("jax_default_device", jax.devices()[5]),
    "enable_x64": ("jax_enable_x64", True),
    "numpy_rank_promotion": ("jax_numpy_rank_promotion", "raise"),
    "numpy_dtype_promotion": ("jax_numpy_dtype_promotion", "strict"),
    "threefry_partitionable": ("jax_threefry_partitionable", False),
    "default_prng_impl": ("jax_default_prng_impl", "rbg"),
    "compilation cache": ("jax_enable_compilation_cache", False),
}


@contextmanager
def configured(name: str) -> Iterator[None]:
    option, value = CONFIGURATION[name]
    before = getattr(jax.config, option)
    jax.config.update(option, value)
    try:
        yield
    finally:
        jax.config.update(option, before)


SETTINGS = [
    *[pytest.param(context, id=f"{name} by context") for name, context in CONTEXTS.items()],
    *[pytest.param(lambda name=name: configured(name), id=f"{name} by configuration") for name in CONFIGURATION],
]


def state() -> dict[str, Any]:
    """Return arrays with every kind of placement, NaN and infinities, and a module."""
    rows = NamedSharding(MESH, PartitionSpec("x"))
    values = np.full((8, 3), np.nan, np.float32)
    values[1] = np.inf
    return {
        "small": jax.device_put(values),
        "large": jax.device_put(np.full(1 << 19, -np.inf, np.float32)),
        "device": jax.device_put(values, SingleDeviceSharding(jax.devices()[2])),
        "sharded": jax.device_put(values, rows),
        "offloaded": jax.device_put(values, rows.with_memory_kind(host_memory())),
        "weak": jnp.asarray(2.5),
        "weak array": jax.device_put(jnp.full(3, 1.5), NamedSharding(MESH, PartitionSpec())),
        "key": jax.random.split(jax.random.key(1), 2),
        "raw": jax.random.PRNGKey(1),
        "half": jax.device_put(values.astype(jnp.bfloat16)),
        "bool": jax.device_put(np.array([True, False])),
        "complex": jax.device_put(np.array([1 + 2j, complex(np.nan, 1)], np.complex64)),
        "step": 3,
        "module": nnx.Linear(2, 3, rngs=nnx.Rngs(0)),
    }


def in_thread(call: Callable[[], Any]) -> Any:
    """Return the result of a call in a new thread."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001  # raised below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def assert_equal(actual: Any, expected: Any, default: Any) -> None:
    """Compare bytes, dtypes, weak types and shardings.

    Uncommitted arrays must be on the default device.
    """
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, leaf), other in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        if isinstance(other, int):
            assert leaf == other and type(leaf) is int
            continue
        assert (leaf.dtype, leaf.committed) == (other.dtype, other.committed), jax.tree_util.keystr(path)
        assert leaf.sharding == other.sharding if other.committed else leaf.devices() == {default}
        if not jax.config.jax_enable_x64:  # with 64-bit numbers, JAX creates no arrays of weak float32
            assert getattr(leaf, "weak_type", None) == getattr(other, "weak_type", None)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf, other = jax.random.key_data(leaf), jax.random.key_data(other)
        with jax.transfer_guard("allow"):  # the test itself transfers data here
            assert np.asarray(leaf).tobytes() == np.asarray(other).tobytes()


@pytest.mark.brings("settings of JAX that raise or change results: debug, guards, device, x64, mesh", "jax", "same")
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_round_trip(tmp_path: Path, settings: Callable[[], Any]) -> None:
    expected, target = state(), state()
    abstract = ckptcore.abstract(state())
    with settings():
        ckptcore.save(tmp_path / "c", expected)
        ckptcore.save_async(tmp_path / "a", expected).result()
        in_thread(lambda: ckptcore.save(tmp_path / "t", expected))
        loaded = [
            ckptcore.load(tmp_path / "a", ckptcore.abstract(expected)),
            ckptcore.load(tmp_path / "c", abstract),
            ckptcore.load_async(tmp_path / "t", abstract).result(),
        ]
        elsewhere = in_thread(lambda: ckptcore.load(tmp_path / "c", abstract))
        ckptcore.load_into(tmp_path / "c", target)
        ckptcore.load(tmp_path / "c", framework="jax")
        default = jax.config.jax_default_device or jax.devices()[0]
        for tree in (*loaded, target):
            assert_equal(tree, expected, default)
        assert_equal(elsewhere, expected, next(iter(elsewhere["small"].devices())))


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="this version of JAX sets no mesh in a thread")
def test_a_background_load_uses_the_settings_of_its_caller(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": np.ones(8), "v": np.ones(8, np.float32)})
    with enable_x64(), jax.default_device(jax.devices()[3]), jax.set_mesh(MESH):
        # The abstract array of the current mesh contains no devices.
        of_mesh = jax.eval_shape(lambda: jax.device_put(jnp.ones(8), NamedSharding(MESH, PartitionSpec("x"))))
        request = {"w": jax.ShapeDtypeStruct((8,), jnp.float64), "v": of_mesh.update(dtype=jnp.float32)}  # type: ignore[no-untyped-call]
        handle = ckptcore.load_async(tmp_path / "c", request)
    loaded = handle.result()
    assert loaded["w"].dtype == jnp.float64 and loaded["w"].devices() == {jax.devices()[3]}
    assert loaded["v"].sharding.is_equivalent_to(NamedSharding(MESH, PartitionSpec("x")), 1)


def test_a_failed_load_changes_no_parameter(tmp_path: Path) -> None:
    """If a load into a module fails in the middle, the module has no mixture of old and new parameters."""
    saved = nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))
    ckptcore.save(tmp_path / "c", {"m": saved}, layout="safetensors")
    data = next((tmp_path / "c").rglob("*.safetensors"))
    content = bytearray(data.read_bytes())
    content[-4] ^= 1
    data.write_bytes(content)
    target = nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(1))
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(target))]
    with pytest.raises(ckptcore.errors.CheckpointError):
        ckptcore.load_into(tmp_path / "c", {"m": target})
    assert all(map(np.array_equal, jax.tree.leaves(nnx.state(target)), before))


@pytest.mark.parametrize("transform", [jax.jit, jax.eval_shape, jax.grad, jax.vmap])
@pytest.mark.parametrize("with_mesh", [False, True] if hasattr(jax, "set_mesh") else [False])
def test_a_load_while_jax_traces(tmp_path: Path, transform: Any, with_mesh: bool) -> None:
    """For example, an initializer may load weights."""
    ckptcore.save(tmp_path / "c", {"w": np.float32(3)})
    argument = jnp.ones(2 if transform is jax.vmap else ())
    results: list[Any] = []

    def function(x: jax.Array) -> jax.Array:
        results.append(ckptcore.load(tmp_path / "c")["w"])
        return x * results[0]

    with jax.set_mesh(MESH) if with_mesh else nullcontext():
        if transform is jax.eval_shape:
            jax.eval_shape(function, argument)
        else:
            transform(function)(argument)
    assert results[0] == 3
