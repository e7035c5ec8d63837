"""Remedies in errors for JAX. Each test follows the advice of the text, and then loads what it saved."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from ckptcore_jax.key_value_coordinator import KeyValueCoordinator
from ckptcore_testing.cases import refused
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckptcore
from ckptcore import Context, Matching
from ckptcore.context import JobOptions

VALUES = np.arange(6.0, dtype=np.float32).reshape(2, 3)


def test_a_stored_text_for_a_requested_array(tmp_path: Path) -> None:
    """A number can be loaded as an array, but a text cannot."""
    ckptcore.save(tmp_path / "c", {"n": 1.5, "text": "a"})
    refused(
        lambda: ckptcore.load(tmp_path / "c", {"n": jnp.zeros(()), "text": jnp.zeros(())}),
        "text: kind: array float32[] is requested, str is stored",
        "Change the requested tree to match the stored one (metadata(location).abstract)",
    )
    loaded = ckptcore.load(tmp_path / "c", {"n": jnp.zeros(()), "text": ""})
    assert loaded["text"] == "a" and isinstance(loaded["n"], jax.Array) and loaded["n"] == 1.5
    assert ckptcore.load(tmp_path / "c", ckptcore.metadata(tmp_path / "c").abstract) == {"n": 1.5, "text": "a"}


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this version of JAX has no mutable arrays")
def test_mutable_arrays(tmp_path: Path) -> None:
    mutable = jax.new_ref(jnp.asarray(VALUES))
    refused(
        lambda: ckptcore.save(tmp_path / "c", {"w": mutable}), "w: a Ref of JAX is mutable; save its value: ref[...]"
    )
    ckptcore.save(tmp_path / "c", {"w": mutable[...]})
    assert np.array_equal(ckptcore.load(tmp_path / "c", {"w": mutable[...]})["w"], VALUES)


@pytest.mark.parametrize(
    ("name", "other"), [("float6_e2m3fn", "float8_e4m3fn"), ("float6_e3m2fn", "float8_e5m2"), ("int1", "int8")]
)
def test_dtypes_that_jax_defines_but_does_not_support(tmp_path: Path, name: str, other: str) -> None:
    if not hasattr(ml_dtypes, name):
        pytest.skip("an older ml_dtypes")
    stored = np.array([0, -1, 0]).astype(getattr(ml_dtypes, name))
    ckptcore.save(tmp_path / "c", {"w": stored})
    refused(
        lambda: ckptcore.load(tmp_path / "c", {"w": jax.ShapeDtypeStruct((3,), stored.dtype)}),
        f"w: an array of {name} cannot be stored or loaded with JAX",
        "use int8 or float8 with Matching(cast='safe'), or a NumPy array",
    )
    assert np.array_equal(ckptcore.load(tmp_path / "c", {"w": np.zeros_like(stored)})["w"], stored)
    like = jax.ShapeDtypeStruct((3,), getattr(jnp, other))
    loaded = ckptcore.load(tmp_path / "c", {"w": like}, matching=Matching(cast="safe"))["w"]
    assert isinstance(loaded, jax.Array) and np.array_equal(np.asarray(loaded, np.float32), stored.astype(np.float32))


def test_shardings_that_do_not_divide_the_shape(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": VALUES})

    def over(devices: int) -> Any:
        mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
        return {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=NamedSharding(mesh, P("x")))}

    refused(
        lambda: ckptcore.load(tmp_path / "c", over(4)),
        "w: an array of shape (2, 3) cannot have the sharding ",
        "; use a sharding whose mesh axes divide the shape",
    )
    loaded = ckptcore.load(tmp_path / "c", over(2))["w"]
    assert np.array_equal(loaded, VALUES) and len(loaded.sharding.device_set) == 2


class Service:
    """The key-value service of a JAX job, simulated in this process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        with self._changed:
            assert allow_overwrite or key not in self._values
            self._values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_in_ms / 1000):
                raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self._values[key]

    def key_value_dir_get_bytes(self, key: str) -> Sequence[tuple[str, bytes]]:
        with self._changed:
            return [(name, value) for name, value in self._values.items() if name.startswith(f"{key}/")]

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            for name in [name for name in self._values if name == key or name.startswith(f"{key}/")]:
                del self._values[name]


def test_processes_that_are_late(tmp_path: Path) -> None:
    def save(rank: int, service: Service, seconds: float) -> None:
        coordinator = KeyValueCoordinator(service, rank, 2, timeout_seconds=seconds)
        context = Context(job=JobOptions(coordinator=coordinator))
        ckptcore.save(tmp_path / "c", {"w": VALUES}, context=context)

    refused(
        lambda: save(0, Service(), 0.01),
        "1 of 2 ranks did not reach the exchange ",
        "within 0.01 s: [1]; check their logs. If they were only late, set Context(job=JobOptions(coordinator=Key",
    )
    service = Service()
    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(lambda rank: save(rank, service, 60), range(2)))
    assert np.array_equal(ckptcore.load(tmp_path / "c")["w"], VALUES)


# --- arrays -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(jax.config.jax_enable_x64, reason="these dtypes are supported")
def test_wide_dtypes(tmp_path: Path) -> None:
    wide = np.arange(6.0)
    ckptcore.save(tmp_path / "c", {"w": wide})
    like = {"w": jax.ShapeDtypeStruct((6,), np.float64)}
    refused(
        lambda: ckptcore.load(tmp_path / "c", like),
        'while jax_enable_x64 is off; call jax.config.update("jax_enable_x64", True), or request a narrower dtype',
    )
    narrow = {"w": jax.ShapeDtypeStruct((6,), np.float32)}
    loaded = ckptcore.load(tmp_path / "c", narrow, matching=Matching(cast="narrowing"))["w"]
    assert np.array_equal(loaded, wide)
    jax.config.update("jax_enable_x64", True)
    try:
        loaded = ckptcore.load(tmp_path / "c", like)["w"]
        assert loaded.dtype == np.float64 and np.array_equal(loaded, wide)
    finally:
        jax.config.update("jax_enable_x64", False)


def test_tracers(tmp_path: Path) -> None:
    @jax.jit
    def step(values: Any) -> Any:
        refused(
            lambda: ckptcore.save(tmp_path / "c", {"w": values}), "save outside, with the arrays that the transformed"
        )
        return values + 1

    ckptcore.save(tmp_path / "c", {"w": step(VALUES)})
    assert np.array_equal(ckptcore.load(tmp_path / "c")["w"], VALUES + 1)


def test_donated_arrays(tmp_path: Path) -> None:
    donating = jax.jit(lambda values: values + 1, donate_argnums=0)
    values = jnp.asarray(VALUES)
    ckptcore.save(tmp_path / "before", {"w": values})
    returned = donating(values)
    if not values.is_deleted():
        values.delete()
    refused(
        lambda: ckptcore.save(tmp_path / "c", {"w": values}),
        "save the array that the function returned, or save before",
    )
    ckptcore.save(tmp_path / "c", {"w": returned})
    assert np.array_equal(ckptcore.load(tmp_path / "c")["w"], VALUES + 1)
    assert np.array_equal(ckptcore.load(tmp_path / "before")["w"], VALUES)


def test_arrays_without_elements(tmp_path: Path) -> None:
    refused(
        lambda: ckptcore.save(tmp_path / "c", {"w": jax.ShapeDtypeStruct((2, 3), np.float32)}),
        "has no elements to save; pass the array itself",
    )
    ckptcore.save(tmp_path / "c", {"w": jnp.asarray(VALUES)})
    assert np.array_equal(ckptcore.load(tmp_path / "c")["w"], VALUES)


# --- random keys


def test_random_keys_of_another_implementation(tmp_path: Path) -> None:
    keys = jax.random.split(jax.random.key(1, impl="rbg"), 2)
    ckptcore.save(tmp_path / "c", {"keys": keys})
    refused(
        lambda: ckptcore.load(tmp_path / "c", {"keys": jax.random.split(jax.random.key(0, impl="unsafe_rbg"), 2)}),
        "request keys with jax.random.key(..., impl='rbg')",
    )
    loaded = ckptcore.load(tmp_path / "c", {"keys": jax.random.split(jax.random.key(0, impl="rbg"), 2)})["keys"]
    assert np.array_equal(jax.random.key_data(loaded), jax.random.key_data(keys))


# --- meshes -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="this version of JAX sets no mesh in a thread")
def test_abstract_meshes(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": VALUES})
    mesh, other = (Mesh(np.array(jax.devices()[:count]), (name,)) for count, name in ((2, "x"), (2, "y")))
    like = {"w": jax.ShapeDtypeStruct((2, 3), np.float32, sharding=NamedSharding(mesh.abstract_mesh, P("x")))}
    refused(
        lambda: ckptcore.load(tmp_path / "c", like),
        "load within `with jax.set_mesh(mesh):`, or call ckptcore.abstract(tree) there and pass its result",
    )
    with jax.set_mesh(mesh):
        copies = [ckptcore.load(tmp_path / "c", like)]
        concrete = ckptcore.abstract(like)
    copies.append(ckptcore.load(tmp_path / "c", concrete))
    with jax.set_mesh(other):
        refused(
            lambda: ckptcore.load(tmp_path / "c", like),
            "set a mesh with the same axes, or create the abstract tree with the current mesh",
        )
        current = NamedSharding(other.abstract_mesh, P("y"))
        copies.append(ckptcore.load(tmp_path / "c", {"w": jax.ShapeDtypeStruct((2, 3), np.float32, sharding=current)}))
    for loaded in copies:
        assert np.array_equal(loaded["w"], VALUES) and len(loaded["w"].sharding.device_set) == 2
