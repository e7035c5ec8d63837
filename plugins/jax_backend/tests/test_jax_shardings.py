"""Shardings become notes of arrays, and notes become shardings again."""

import json
import math
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ckptcore_jax import JaxLeafHandler, sharding_from_notes
from ckptcore_testing.servers import free_port
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

HANDLER = JaxLeafHandler()
HAS_AXIS_TYPES = hasattr(jax.sharding, "AxisType") and hasattr(jax.sharding.AxisType, "Explicit")


def mesh_of(ids, **axes: int) -> Mesh:
    devices = np.array(jax.devices())[list(ids)]
    return Mesh(devices.reshape(tuple(axes.values())), tuple(axes))


def notes_of(sharding, shape=(16, 8)) -> dict:
    """Return the notes of an array as JSON, like a load reads them."""
    return json.loads(json.dumps(dict(HANDLER.describe(jax.device_put(jnp.zeros(shape), sharding)).notes)))


def noted(mesh: dict, spec: list, **more) -> dict:
    return {"sharding": {"type": "NamedSharding", "mesh": mesh, "spec": spec} | more}


def other_memory_kind(device) -> str:
    default = device.default_memory().kind
    others = [memory.kind for memory in device.addressable_memories() if memory.kind != default]
    return others[0] if others else pytest.skip("this version of JAX has one kind of memory on a CPU")


# --- notes


def test_devices_in_order_are_not_listed():
    assert notes_of(NamedSharding(mesh_of(range(8), z=2, a=4), P("a", None))) == noted({"z": 2, "a": 4}, ["a", None])
    assert notes_of(NamedSharding(mesh_of(range(4), a=4), P())) == noted({"a": 4}, [])
    assert notes_of(NamedSharding(mesh_of([0], a=1), P("a"))) == noted({"a": 1}, ["a"])


@pytest.mark.parametrize("ids", [[7, 6, 5, 4, 3, 2, 1, 0], [0, 2, 4, 6, 1, 3, 5, 7]])
def test_devices_in_another_order_are_listed_in_the_order_of_the_mesh(ids):
    notes = notes_of(NamedSharding(mesh_of(ids, a=4, b=2), P(("b", "a"))))
    assert notes == noted({"a": 4, "b": 2}, [["b", "a"]], devices=ids)


def test_a_subset_other_than_the_first_devices_is_listed():
    assert notes_of(NamedSharding(mesh_of([4, 5, 6, 7], a=4), P("a"))) == noted({"a": 4}, ["a"], devices=[4, 5, 6, 7])


def test_the_order_of_the_axes_survives_json():
    sharding = NamedSharding(mesh_of(range(8), z=4, a=2), P("a", "z"))
    assert list(notes_of(sharding)["sharding"]["mesh"]) == ["z", "a"]


@pytest.mark.skipif(not HAS_AXIS_TYPES, reason="this version of JAX has no types of axes")
def test_types_of_axes_are_noted_if_any_is_not_auto():
    kinds = (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
    sharding = NamedSharding(Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"), axis_types=kinds), P("b"))
    notes = notes_of(sharding)
    assert notes == noted({"a": 4, "b": 2}, ["b"], axis_types=["Auto", "Explicit"])
    assert sharding_from_notes(notes) == sharding


def test_name_of_a_device_equals_that_of_orbax(tmp_path):
    orbax = pytest.importorskip("orbax.checkpoint.experimental.v1")
    if not hasattr(orbax, "save"):
        pytest.skip("an older version of Orbax")
    sharding = SingleDeviceSharding(jax.devices()[3])
    orbax.save(tmp_path / "checkpoint", {"w": jax.device_put(jnp.zeros(4), sharding)})
    (kept,) = json.loads((tmp_path / "checkpoint" / "state" / "_sharding").read_bytes()).values()
    theirs = json.loads(kept)
    assert notes_of(sharding)["sharding"] == {"type": "SingleDeviceSharding", "device": theirs["device_str"]}


# --- round trips


@st.composite
def shardings(draw):
    sizes = draw(st.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2), (4,), (2, 2), (2,), (1, 8), (2, 1, 3), (1,)]))
    order = draw(st.permutations(range(8)))[: math.prod(sizes)]
    names = "zyx"[: len(sizes)]
    axes: list[list[str]] = [[] for _ in range(draw(st.integers(0, 3)))]
    for name in draw(st.permutations(names))[: draw(st.integers(0, len(names)))] if axes else []:
        axes[draw(st.integers(0, len(axes) - 1))].append(name)
    spec = P(*[tuple(part) if len(part) > 1 else part[0] if part else None for part in axes])
    return NamedSharding(mesh_of(order, **dict(zip(names, sizes, strict=True))), spec), (24,) * len(axes)


@settings(deadline=None)
@given(shardings())
def test_any_mesh_and_spec_are_restored(drawn):
    sharding, shape = drawn
    shape = tuple(extent * 8 for extent in shape)
    abstract = jax.ShapeDtypeStruct(shape, jnp.int8, sharding=sharding)
    notes = json.loads(json.dumps(dict(HANDLER.describe(abstract).notes)))
    restored = sharding_from_notes(notes)
    assert restored == sharding
    assert restored.devices_indices_map(shape) == sharding.devices_indices_map(shape)


def test_single_device_sharding_is_restored():
    for device in (jax.devices()[0], jax.devices()[6]):
        assert sharding_from_notes(notes_of(SingleDeviceSharding(device))) == SingleDeviceSharding(device)


@pytest.mark.parametrize("make", [
    lambda **kind: SingleDeviceSharding(jax.devices()[2], **kind),
    lambda **kind: NamedSharding(mesh_of(range(8), a=8), P("a"), **kind),
])  # fmt: skip
def test_unknown_memory_kinds_load_as_the_default(make):
    kind = other_memory_kind(jax.devices()[0])
    notes = notes_of(make(memory_kind=kind))
    assert notes["memory_kind"] == kind
    assert sharding_from_notes(notes) == make(memory_kind=kind) != make()
    for strange in ("core_memory", 3, None, ["device"]):
        assert sharding_from_notes(notes | {"memory_kind": strange}) == make()


def test_old_names_of_devices_and_old_notes_are_read():
    old = {"sharding": {"type": "SingleDeviceSharding", "device": "TFRT_CPU_5"}}
    assert sharding_from_notes(old) == SingleDeviceSharding(jax.devices()[5])
    assert sharding_from_notes({}) is None
    assert sharding_from_notes({"memory_kind": "pinned_host"}) is None
    assert sharding_from_notes(noted({"a": 2, "b": 2}, ["b", ["a"]])) == NamedSharding(
        mesh_of(range(4), a=2, b=2), P("b", "a")
    )


def test_notes_may_contain_default_values():
    said = noted({"a": 2, "b": 2}, ["a"], devices=[0, 1, 2, 3], axis_types=["Auto", "Auto"])
    assert sharding_from_notes(said) == NamedSharding(mesh_of(range(4), a=2, b=2), P("a"))


# --- other devices


def test_missing_devices_are_replaced_by_position():
    four = jax.devices()[4:]
    assert sharding_from_notes(noted({"a": 4}, ["a"]), four) == NamedSharding(mesh_of([4, 5, 6, 7], a=4), P("a"))
    turned = noted({"a": 4}, ["a"], devices=[300, 100, 200, 0])
    assert sharding_from_notes(turned, four) == NamedSharding(mesh_of([7, 5, 6, 4], a=4), P("a"))
    single = {"sharding": {"type": "SingleDeviceSharding", "device": "cuda:1"}}
    assert sharding_from_notes(single, four) == SingleDeviceSharding(four[0])


def test_too_few_devices_give_no_sharding():
    notes = noted({"a": 4, "b": 2}, ["a"])
    assert sharding_from_notes(notes) is not None
    assert sharding_from_notes(notes, jax.devices()[:7]) is None
    assert sharding_from_notes({"sharding": {"type": "SingleDeviceSharding", "device": "cpu:0"}}, []) is None


def test_notes_of_other_classes_give_no_sharding():
    assert sharding_from_notes({"sharding": {"type": "GSPMDSharding", "devices": 8}}) is None


HOSTILE = [
    None, 1, "NamedSharding", [], {}, {"type": None}, {"type": ["NamedSharding"]}, {"type": "NamedSharding"},
    {"type": "SingleDeviceSharding"}, {"type": "SingleDeviceSharding", "device": 3},
    *(noted(mesh, spec)["sharding"] for mesh, spec in (
        ({"a": 10**30}, []), ({"a": 0}, []), ({"a": -8}, []), ({"a": True}, []), ({"a": 2.0}, []), ({"a": "8"}, []),
        ([8], []), (None, []), ({"a": 8}, None), ({"a": 8}, "a"), ({"a": 8}, {"a": 1}), ({"a": 8}, ["z"]),
        ({"a": 8}, ["a", "a"]), ({"a": 8}, [["a", "a"]]), ({"a": 8}, [[["a"]]]), ({"a": 8}, [3]), ({"a": 8}, [{}]),
        ({f"a{n}": 1 for n in range(70)}, []), ({f"a{n}": 10**9 for n in range(70)}, []),
    )),
    *(noted({"a": 2}, ["a"], **more)["sharding"] for more in (
        {"devices": [0]}, {"devices": [0, 0]}, {"devices": [0, "1"]}, {"devices": [0, None]}, {"devices": [True, 2]},
        {"devices": 2}, {"devices": {"0": 1}}, {"devices": [[0], [1]]}, {"devices": [0, 1.0]},
        *([{"axis_types": ["Nonsense"]}, {"axis_types": ["Auto", "Auto"]}, {"axis_types": "Auto"},
           {"axis_types": [None]}, {"axis_types": [["Auto"]]}, {"axis_types": 3}] if HAS_AXIS_TYPES else []),
    )),
]  # fmt: skip


@pytest.mark.parametrize("hostile", HOSTILE, ids=str)
def test_malformed_notes_give_no_sharding(hostile):
    assert sharding_from_notes({"sharding": hostile}) is None


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["a", "b", "Auto", "x"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(["NamedSharding", "SingleDeviceSharding"]),
            "mesh": ANY_JSON | st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 4), max_size=2),
            "spec": ANY_JSON | st.lists(ANY_JSON, max_size=3),
        },
        optional={"devices": ANY_JSON, "axis_types": ANY_JSON, "device": ANY_JSON},
    ),
    ANY_JSON,
)
def test_any_notes_give_a_sharding_or_none(sharding, memory_kind):
    restored = sharding_from_notes({"sharding": sharding, "memory_kind": memory_kind})
    assert restored is None or restored.device_set <= set(jax.devices())


# --- several processes


@pytest.mark.system
def test_processes_of_a_job_write_equal_notes_and_load_to_their_own_devices():
    program = """
        import json, sys, jax, jax.numpy as jnp, numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
        from ckptcore_jax import JaxLeafHandler, sharding_from_notes
        jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
        own = jax.local_devices()
        assert (len(own), len(jax.devices())) == (2, 4)
        everywhere = NamedSharding(Mesh(np.array(jax.devices())[::-1].reshape(2, 2), ("a", "b")), P("b"))
        here = NamedSharding(Mesh(np.array(own)[::-1], ("a",)), P("a"))
        told = []
        for sharding in (everywhere, here, SingleDeviceSharding(own[0]), SingleDeviceSharding(own[1])):
            notes = JaxLeafHandler().describe(jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding)).notes
            assert sharding_from_notes(notes) == sharding, (sharding_from_notes(notes), sharding)
            told.append(dict(notes))
        print(json.dumps(told))
    """
    address = f"127.0.0.1:{free_port()}"
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), address, str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outcomes = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), [errors[-2000:] for _, errors in outcomes]
    first, second = (json.loads(output) for output, _ in outcomes)
    assert first == second
    assert "devices" in first[0]["sharding"] and first[2]["sharding"]["device"] != first[3]["sharding"]["device"]
