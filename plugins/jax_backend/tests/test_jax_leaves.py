"""The leaf handler, tested directly: records, host data and built arrays."""

import dataclasses
import functools
import gc
import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from ckptcore_jax import JaxLeafHandler, leaves
from ckptcore_jax.plugin import ckpt_leaf_handler
from ckptcore_jax.shardings import placement_of
from ckptcore_jax.testing import enable_x64
from ckptcore_testing import LateHostMemory, LeafExample, LeafHandlerTests
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import ckptcore
from ckptcore.errors import PluginError, UnsupportedLeafError
from ckptcore.model import ArrayRecord, ArraySpec, Box, name_of_dtype
from ckptcore.planning import cuts_of, uncovered

HANDLER = JaxLeafHandler()
WIDE = {"int64", "uint64", "float64", "complex128"}
DTYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128", "bfloat16",
    "int2", "int4", "uint2", "uint4", "float4_e2m1fn",
    "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip
AVAILABLE = [name for name in DTYPES if hasattr(jnp, name)]
EVERYWHERE = [name for name in AVAILABLE if name not in WIDE]


def mesh(**axes: int) -> Mesh:
    count = math.prod(axes.values())
    return Mesh(np.array(jax.devices()[:count]).reshape(tuple(axes.values())), tuple(axes))


def numbers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Return elements with many bit patterns, also NaN."""
    numpy_dtype = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    generator = np.random.default_rng(seed)
    if dtype == "bool" or (numpy_dtype.itemsize == 1 and dtype in ("int2", "int4", "uint2", "uint4", "float4_e2m1fn")):
        low, high = {"bool": (0, 2), "int2": (-2, 2), "int4": (-8, 8)}.get(dtype, (0, 4))
        return generator.integers(low, high, shape).astype(numpy_dtype)
    return np.frombuffer(generator.bytes(math.prod(shape) * numpy_dtype.itemsize), numpy_dtype).reshape(shape).copy()


def aligned(array: np.ndarray) -> np.ndarray:
    """Copy elements to an address that is a multiple of 64 bytes. JAX can use such memory without a copy."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    made = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


def elements(leaf: jax.Array) -> np.ndarray:
    """Return the elements as a NumPy array, read without the leaf handler."""
    return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


def on_host(leaf: jax.Array, handler: JaxLeafHandler = HANDLER) -> dict[Box, np.ndarray]:
    boxes = [shard.box for shard in handler.shards(leaf, 0, 1)]
    copies = handler.copy_to_host(leaf, boxes, LateHostMemory())
    return {box: pending.result() for box, pending in zip(boxes, copies, strict=True)}


def on_device(number: int) -> dict[str, object]:
    """Return the notes of an array on one device."""
    return {"sharding": {"type": "SingleDeviceSharding", "device": f"cpu:{number}"}}


def read(array: np.ndarray, boxes) -> list[tuple[Box, np.ndarray]]:
    """Return the boxes of an array with their elements, as a load passes them to `build`."""
    return [(box, aligned(array[box.slices])) for box in boxes]


def make_example(dtype: str, shape: tuple[int, ...], sharding) -> LeafExample:
    expected = numbers(shape, dtype)
    where = "one" if sharding is None else f"{sharding.spec}"
    return LeafExample(
        f"{dtype}-{shape}-{where}",
        lambda: jax.device_put(expected.copy(), sharding),
        expected,
        elements,
        [
            lambda: jax.ShapeDtypeStruct(shape, expected.dtype),
            lambda: jax.ShapeDtypeStruct(shape, expected.dtype, sharding=NamedSharding(mesh(x=4), P())),
        ],
    )


def make_keys(impl: str, shape: tuple[int, ...]) -> jax.Array:
    key = jax.random.key(7, impl=impl)
    return key if shape == () else jax.random.split(key, shape)


def key_example(impl: str, shape: tuple[int, ...]) -> LeafExample:
    return LeafExample(
        f"key-{impl}-{shape}",
        lambda: make_keys(impl, shape),
        np.asarray(jax.random.key_data(make_keys(impl, shape))),
        elements,
        [lambda: jax.eval_shape(lambda: make_keys(impl, shape))],
    )


def examples() -> list[LeafExample]:
    grid = mesh(a=2, b=4)
    made = [make_example(dtype, (8, 4), None) for dtype in EVERYWHERE]
    made += [make_example(dtype, (8, 4), NamedSharding(grid, P("b", "a"))) for dtype in EVERYWHERE]
    made += [make_example("float32", shape, None) for shape in ((), (0,), (3, 0, 2), (1,), (5, 3, 2))]
    made += [
        make_example("float32", (8, 4), NamedSharding(grid, spec))
        for spec in (P(), P("a"), P(None, "b"), P(("a", "b")), P(("b", "a"), None))
    ]
    made += [key_example(impl, shape) for impl in ("threefry2x32", "rbg", "unsafe_rbg") for shape in ((), (4,), (2, 3))]
    return made


EXAMPLES = examples()

several_kinds_of_memory = pytest.mark.skipif(
    len(jax.devices()[0].addressable_memories()) == 1, reason="this version of JAX has one kind of memory on a CPU"
)


class TestConformance(LeafHandlerTests):
    handler = HANDLER
    examples = EXAMPLES
    unsupported = tuple(
        functools.partial(jax.ShapeDtypeStruct, (2,), getattr(jnp, name))
        for name in ("int1", "uint1", "float6_e2m3fn")
        if hasattr(jnp, name)  # an older ml_dtypes lacks some of these dtypes
    )


class TestViewingConformance(LeafHandlerTests):
    handler = JaxLeafHandler(copy=False)
    examples = tuple(example for example in EXAMPLES if example.name.startswith(("float32", "int4", "key-rbg")))


@pytest.mark.parametrize("dtype", [name for name in AVAILABLE if name in WIDE])
def test_dtypes_of_64_bits_are_restored(dtype):
    expected = numbers((3, 5), dtype)
    with enable_x64():
        leaf = jax.device_put(expected)
        record = HANDLER.describe(leaf)
        assert record == ArrayRecord(ArraySpec((3, 5), dtype), notes=on_device(0))
        built = HANDLER.build(leaf, record, read(expected, HANDLER.wanted(leaf, record)))
        assert built.dtype == dtype
        assert np.asarray(built).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", sorted(WIDE))
def test_dtypes_of_64_bits_are_never_narrowed_silently(dtype):
    class Abstract:
        shape, sharding, weak_type = (2,), None, False

    abstract = Abstract()
    abstract.dtype = np.dtype(dtype)
    stored = ArrayRecord(ArraySpec((2,), dtype))
    with pytest.raises(UnsupportedLeafError, match="jax_enable_x64"):
        HANDLER.build(abstract, stored, [(Box.whole((2,)), np.zeros(2, dtype))])


def test_record_of_a_sharded_array_has_cuts_and_sharding():
    leaf = jax.device_put(
        np.zeros((8, 4), np.float32), NamedSharding(mesh(data=2, model=4), P(("model", "data"), None))
    )
    record = HANDLER.describe(leaf)
    assert record.cuts == ((1, 2, 3, 4, 5, 6, 7), ())
    assert json.loads(json.dumps(record.notes)) == {
        "sharding": {"type": "NamedSharding", "mesh": {"data": 2, "model": 4}, "spec": [["model", "data"], None]}
    }


def test_notes_of_an_array_on_one_device_name_the_device():
    for number in (0, 5):
        record = HANDLER.describe(jax.device_put(np.zeros((8, 4), np.float32), jax.devices()[number]))
        assert record == ArrayRecord(ArraySpec((8, 4), "float32"), notes=on_device(number))


def test_abstract_array_without_a_sharding_has_no_notes():
    assert not HANDLER.describe(jax.ShapeDtypeStruct((8, 4), jnp.float32)).notes


def test_equal_arrays_share_their_record_and_equal_shardings_their_note():
    first, second = (HANDLER.describe(jnp.full((16,), value)) for value in (1.0, 2.0))
    assert first is second
    assert HANDLER.describe(jnp.zeros((3,))).notes["sharding"] is first.notes["sharding"]


def test_replicas_on_devices_of_one_process_are_one_shard():
    leaf = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh(a=2, b=4), P("a")))
    shards = HANDLER.shards(leaf, 0, 1)
    assert [(shard.box, shard.replica, shard.replicas) for shard in shards] == [
        (Box((0,), (4,)), 0, 1),
        (Box((4,), (8,)), 0, 1),
    ]


def test_weak_types_are_stored_and_restored():
    for leaf in (jnp.asarray(2.5), jnp.asarray(3), jnp.full((3,), 2.0), jnp.asarray(1j)):
        assert leaf.weak_type
        record = HANDLER.describe(leaf)
        assert record.notes == {"weak_type": True} | on_device(0)
        for abstract in (leaf, jax.eval_shape(lambda leaf=leaf: leaf), jax.device_put(leaf, jax.devices()[2])):
            built = HANDLER.build(abstract, record, read(np.asarray(leaf), HANDLER.wanted(abstract, record)))
            assert built.weak_type and built.dtype == leaf.dtype
            assert np.array_equal(built, leaf)
            if abstract.sharding is not None:
                assert built.sharding == abstract.sharding
    strong = jnp.asarray(2.5, jnp.float32)
    assert not HANDLER.build(strong, record, read(np.asarray(strong), [Box((), ())])).weak_type


@several_kinds_of_memory
def test_memory_kinds_are_stored_and_restored():
    device = jax.devices()[3]
    default = device.default_memory().kind
    others = [memory.kind for memory in device.addressable_memories() if memory.kind != default]
    assert others, "this backend has one kind of memory"
    expected = np.arange(1024, dtype=np.float32)
    leaf = jax.device_put(expected, SingleDeviceSharding(device, memory_kind=others[0]))
    record = HANDLER.describe(leaf)
    assert record.notes == {"memory_kind": others[0]} | on_device(3)
    assert np.array_equal(on_host(leaf)[Box.whole((1024,))], expected)
    built = HANDLER.build(leaf, record, read(expected, HANDLER.wanted(leaf, record)))
    assert built.sharding == leaf.sharding
    assert np.array_equal(built, expected)


@pytest.mark.parametrize("spec", [P(), P("a"), P(None, "b"), P("b", "a"), P(("a", "b"))])
def test_arrays_in_host_memory_are_viewed_without_copies(spec):
    leaf = jax.device_put(np.arange(64, dtype=np.float32).reshape(8, 8), NamedSharding(mesh(a=2, b=4), spec))
    pointers = {shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards}
    boxes = [shard.box for shard in HANDLER.shards(leaf, 0, 1)]
    views = [pending.result() for pending in HANDLER.view_on_host(leaf, boxes)]
    views += on_host(leaf, JaxLeafHandler(copy=False)).values()
    assert all(part.ctypes.data in pointers for part in views)
    assert not any(part.flags.writeable for part in views)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2"])
def test_an_array_does_not_cache_unpacked_copies(dtype):
    leaf = jax.device_put(numbers((64,), dtype))
    first = on_host(leaf)[Box.whole((64,))]
    second = on_host(leaf)[Box.whole((64,))]
    assert not np.shares_memory(first, second)


def jitted_in_place():
    return jax.jit(lambda array: array * 2 + 1, donate_argnums=0)


def test_donation_reuses_the_memory_of_an_array_without_views():
    leaf = jnp.arange(1 << 16, dtype=jnp.float32)
    pointer = leaf.unsafe_buffer_pointer()
    result = jitted_in_place()(leaf)
    assert result.unsafe_buffer_pointer() == pointer, "the tests of donation below would test nothing"


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("end", ["delete", "donate", "forget"])
def test_views_keep_the_memory_of_deleted_and_donated_arrays(sharded, end):
    expected = np.arange(1 << 16, dtype=np.float32)
    sharding = NamedSharding(mesh(a=8), P("a")) if sharded else None
    leaf = jax.device_put(jnp.arange(1 << 16, dtype=jnp.float32), sharding)
    leaf = jax.jit(lambda array: array + 0, out_shardings=sharding)(leaf)  # memory that JAX itself allocated
    parts = on_host(leaf)
    if end == "delete":
        leaf.delete()
    elif end == "donate":
        donated = jitted_in_place()
        leaf = donated(leaf)
        for _ in range(5):
            leaf = donated(leaf)
        leaf.block_until_ready()
    del leaf
    gc.collect()
    others = [jnp.full((1 << 16,), float(number)) for number in range(8)]
    assert all(np.array_equal(part, expected[box.slices]) for box, part in parts.items())
    assert len(others) == 8


def test_a_save_does_not_prevent_later_donations():
    leaf = jnp.arange(1 << 16, dtype=jnp.float32)
    pointer = leaf.unsafe_buffer_pointer()
    parts = on_host(leaf)
    del parts
    assert jitted_in_place()(leaf).unsafe_buffer_pointer() == pointer


def test_views_wait_for_the_computation():
    leaf = jax.jit(lambda array: array @ array @ array)(jnp.ones((700, 700)))
    (part,) = on_host(leaf).values()
    assert (part == 700.0 * 700.0).all()


@pytest.mark.parametrize("make", [jax.device_put, jax.dlpack.from_dlpack])
def test_arrays_that_alias_the_callers_memory_are_copied(make):
    mine = aligned(np.arange(1024, dtype=np.float32))
    leaf = make(mine)
    assert leaf.unsafe_buffer_pointer() == mine.ctypes.data, "this does not alias, and would test nothing"
    (aliased,) = on_host(leaf, JaxLeafHandler(copy=False)).values()
    (copied,) = on_host(leaf).values()
    mine[:] = -1
    assert np.array_equal(copied, np.arange(1024, dtype=np.float32))
    assert (aliased == -1).all(), "README says what this option is not for"


@several_kinds_of_memory
def test_arrays_that_an_accelerator_offloaded_to_the_host_are_copied(monkeypatch):
    mine = aligned(np.arange(1024, dtype=np.float32))
    leaf = jax.device_put(mine, SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))
    assert leaf.unsafe_buffer_pointer() == mine.ctypes.data, "this does not alias, and would test nothing"

    def of_an_accelerator(sharding, shape):
        return dataclasses.replace(placement_of(sharding, shape), on_cpu=False)

    monkeypatch.setattr(leaves, "placement_of", of_an_accelerator)
    (copied,) = on_host(leaf).values()
    mine[:] = -1
    assert np.array_equal(copied, np.arange(1024, dtype=np.float32))


@pytest.mark.parametrize("rows", [8, 1 << 11])
@pytest.mark.parametrize("placed", ["default", "device", "sharded", "replicated"])
def test_donated_arrays_reuse_their_memory(placed: str, rows: int) -> None:
    """JAX cannot donate memory that the CPU backend borrows from NumPy, so a step would allocate a second state."""
    sharding = {
        "default": None,
        "device": SingleDeviceSharding(jax.devices()[3]),
        "sharded": NamedSharding(mesh(a=4, b=2), P("a", "b")),
        "replicated": NamedSharding(mesh(a=4, b=2), P("a")),
    }[placed]
    expected = np.arange(rows * 1024, dtype=np.float32).reshape(rows, 1024)
    stored = ArrayRecord(ArraySpec(expected.shape, "float32"))
    abstract = jax.ShapeDtypeStruct(expected.shape, jnp.float32, sharding=sharding)
    boxes = read(expected, HANDLER.wanted(abstract, stored))
    built = HANDLER.build(abstract, stored, boxes)
    assert not HANDLER.keeps_memory(abstract)
    for _, part in boxes:
        part[...] = 0  # the core reuses this memory after `build`
    before = {shard.data.unsafe_buffer_pointer() for shard in built.addressable_shards}
    assert len(before) == len(built.addressable_shards)
    after = jax.jit(lambda array: array + 1, donate_argnums=0)(built)
    assert {shard.data.unsafe_buffer_pointer() for shard in after.addressable_shards} == before
    assert np.array_equal(after, expected + 1)


@pytest.mark.skipif(jax.__version_info__ < (0, 6), reason="this version of JAX ignores may_alias=False")
def test_donated_weak_numbers_reuse_their_memory() -> None:
    """JAX borrows the memory of a NumPy scalar if it happens to be aligned."""
    stored, abstract = ArrayRecord(ArraySpec((), "int32")), jax.ShapeDtypeStruct((), jnp.int32, weak_type=True)
    boxes = read(np.int32(7), HANDLER.wanted(abstract, stored))
    built = [HANDLER.build(abstract, stored, boxes) for _ in range(200)]
    before = {array.unsafe_buffer_pointer() for array in built}
    after = jax.jit(lambda arrays: [array + 1 for array in arrays], donate_argnums=0)(built)
    assert {array.unsafe_buffer_pointer() for array in after} == before


def test_only_committed_arrays_load_as_committed():
    stored = ArrayRecord(ArraySpec((4,), "float32"))
    part = [(Box.whole((4,)), np.zeros(4, np.float32))]
    for abstract, committed in (
        (jnp.zeros(4), False),
        (jax.device_put(jnp.zeros(4), jax.devices()[2]), True),
        (jax.ShapeDtypeStruct((4,), jnp.float32), False),
        (jax.ShapeDtypeStruct((4,), jnp.float32, sharding=SingleDeviceSharding(jax.devices()[1])), True),
    ):
        built = HANDLER.build(abstract, stored, part)
        assert built.committed is committed
        if committed:
            assert built.sharding == abstract.sharding


@pytest.mark.parametrize("to", ["bfloat16", "float16", "int32", "float8_e4m3fn"])
def test_elements_are_cast_to_the_requested_dtype(to):
    saved = np.array([[0.0, 1.0], [-2.0, 100.5]], np.float32)
    stored = ArrayRecord(ArraySpec((2, 2), "float32"))
    abstract = jax.ShapeDtypeStruct((2, 2), to, sharding=NamedSharding(mesh(a=2), P("a")))
    built = HANDLER.build(abstract, stored, read(saved, HANDLER.wanted(abstract, stored)))
    assert built.dtype == to and built.sharding == abstract.sharding
    assert np.asarray(built).tobytes() == saved.astype(built.dtype).tobytes()


@pytest.mark.parametrize("dtype", ["complex64", "S3", "U2", "datetime64[s]"])
def test_impossible_cast_is_refused(dtype):
    stored = ArrayRecord(ArraySpec((2,), dtype))
    with pytest.raises(UnsupportedLeafError, match="cannot represent"):
        HANDLER.build(
            jax.ShapeDtypeStruct((2,), jnp.float32), stored, [(Box.whole((2,)), np.zeros(2, stored.spec.numpy_dtype))]
        )


# --- random keys


def test_random_key_is_described_as_its_data():
    record = HANDLER.describe(jax.random.split(jax.random.key(0, impl="rbg"), 6))
    assert record == ArrayRecord(ArraySpec((6, 4), "uint32"), "jax.key", notes={"impl": "rbg"} | on_device(0))


def test_sharded_random_keys_load_sharded():
    sharding = NamedSharding(mesh(a=4, b=2), P("a"))
    leaf = jax.device_put(jax.random.split(jax.random.key(3), 8), sharding)
    record = HANDLER.describe(leaf)
    assert record.spec == ArraySpec((8, 2), "uint32") and record.cuts == ((2, 4, 6), ())
    whole = np.zeros((8, 2), np.uint32)
    for box, part in on_host(leaf).items():
        whole[box.slices] = part
    for abstract in (leaf, jax.ShapeDtypeStruct((8,), leaf.dtype, sharding=sharding)):
        built = HANDLER.build(abstract, record, read(whole, HANDLER.wanted(abstract, record)))
        assert built.sharding == leaf.sharding and built.dtype == leaf.dtype
        assert np.array_equal(jax.random.uniform(built[5], (3,)), jax.random.uniform(leaf[5], (3,)))


def test_keys_of_another_implementation_are_refused():
    stored = HANDLER.describe(jax.random.key(0, impl="rbg"))
    with pytest.raises(UnsupportedLeafError, match="'rbg'.*'unsafe_rbg'"):
        HANDLER.wanted(jax.random.key(0, impl="unsafe_rbg"), stored)


@pytest.mark.parametrize("spec", [ArraySpec((3,), "uint32"), ArraySpec((2,), "int32"), ArraySpec((), "uint32")])
def test_arrays_that_are_no_keys_are_refused_as_keys(spec):
    with pytest.raises(UnsupportedLeafError, match="random keys"):
        HANDLER.wanted(jax.random.key(0), ArrayRecord(spec))


def test_keys_load_as_data_and_data_loads_as_keys():
    key = jax.random.key(11)
    data = jax.random.key_data(key)
    as_data = HANDLER.build(data, HANDLER.describe(key), read(np.asarray(data), [Box.whole((2,))]))
    assert np.array_equal(as_data, data)
    as_key = HANDLER.build(key, HANDLER.describe(data), read(np.asarray(data), [Box.whole((2,))]))
    assert as_key.dtype == key.dtype and np.array_equal(jax.random.key_data(as_key), data)


# --- ties


def test_the_same_array_is_tied_and_an_equal_one_is_not():
    first, second = jnp.arange(8.0), jnp.arange(8.0)
    assert HANDLER.identity(first) == HANDLER.identity(first) is not None
    assert HANDLER.identity(first) != HANDLER.identity(second)
    sharding = NamedSharding(mesh(a=8), P("a"))
    sharded, other = jax.device_put(first, sharding), jax.device_put(first, sharding)
    assert HANDLER.identity(sharded) == HANDLER.identity(sharded) is not None
    assert HANDLER.identity(sharded) != HANDLER.identity(other)
    assert HANDLER.identity(sharded) == HANDLER.identity(jax.device_put(sharded, sharding))


def test_empty_abstract_and_deleted_arrays_are_never_tied():
    gone = jnp.ones(3)
    gone.delete()
    for leaf in (jnp.zeros((0, 3)), jax.ShapeDtypeStruct((2,), jnp.float32), gone):
        assert HANDLER.identity(leaf) is None


def test_arrays_with_equal_memory_but_different_shapes_are_not_tied():
    mine = aligned(np.arange(16, dtype=np.float32))
    flat, square = jax.device_put(mine), jax.device_put(mine.reshape(4, 4))
    assert flat.unsafe_buffer_pointer() == square.unsafe_buffer_pointer()
    assert HANDLER.identity(flat) != HANDLER.identity(square)


def test_arrays_that_share_memory_of_numpy_load_with_their_own_placements(tmp_path):
    mine, devices = aligned(np.arange(24, dtype=np.float32)), jax.devices()
    state = {
        "default": jax.device_put(mine),
        "first": jax.device_put(mine, devices[0]),
        "third": jax.device_put(mine, devices[2]),
    }
    assert len({leaf.unsafe_buffer_pointer() for leaf in state.values()}) == 1
    expected = {name: (leaf.committed, leaf.devices()) for name, leaf in state.items()}
    # Something else must be tied, because nothing is compared in a checkpoint without ties.
    tied = jnp.ones(3)
    ckptcore.save(tmp_path / "c", {**state, "tied": [tied, tied]})
    target = {**state, "tied": [tied, tied]}
    ckptcore.load_into(tmp_path / "c", target)
    wanted = {**state, "tied": [tied, tied]}
    for loaded in (
        target,
        ckptcore.load(tmp_path / "c", wanted),
        ckptcore.load(tmp_path / "c", ckptcore.abstract(wanted)),
    ):
        assert loaded["tied"][0] is loaded["tied"][1]
        del loaded["tied"]
        assert {name: (leaf.committed, leaf.devices()) for name, leaf in loaded.items()} == expected


# --- refused


def test_deleted_and_donated_arrays_serve_only_as_abstract_arrays():
    deleted, donated = jnp.ones((2, 3)), jnp.ones((1 << 12,))
    deleted.delete()
    jitted_in_place()(donated)
    for leaf in (deleted, donated):
        assert leaf.is_deleted()
        for use in (
            lambda leaf=leaf: HANDLER.shards(leaf, 0, 1),
            lambda leaf=leaf: HANDLER.view_on_host(leaf, [Box.whole(leaf.shape)]),
            lambda leaf=leaf: HANDLER.copy_to_host(leaf, [Box.whole(leaf.shape)], LateHostMemory()),
        ):
            with pytest.raises(UnsupportedLeafError, match="deleted, or donated"):
                use()
        stored = HANDLER.describe(leaf)
        whole = np.zeros(leaf.shape, np.float32)
        assert HANDLER.build(leaf, stored, read(whole, HANDLER.wanted(leaf, stored))).shape == leaf.shape


def test_tracers_are_refused():
    def save(array):
        handler = ckpt_leaf_handler(type(array), array)
        with pytest.raises(UnsupportedLeafError, match="tracer.*outside"):
            handler.describe(array)
        return array

    jax.jit(save)(jnp.ones(2))
    jax.grad(lambda array: save(array).sum())(jnp.ones(2))
    jax.vmap(save)(jnp.ones((2, 2)))
    jax.jit(save)(jax.random.key(0))


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this version of JAX has no references")
def test_references_are_refused():
    ref = jax.new_ref(jnp.ones(2))
    with pytest.raises(UnsupportedLeafError, match=r"ref\[\.\.\.\]"):
        ckpt_leaf_handler(type(ref), ref).describe(ref)


def test_abstract_arrays_cannot_be_saved():
    with pytest.raises(UnsupportedLeafError, match="no elements"):
        HANDLER.shards(jax.ShapeDtypeStruct((2,), jnp.float32), 0, 1)


@pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="this version of JAX has no partial sums")
def test_partial_sums_are_refused():
    explicit = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with pytest.raises(UnsupportedLeafError, match="partial sums"):
        HANDLER.describe(
            jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(explicit, P("a", unreduced={"b"})))
        )


def test_abstract_meshes_are_refused_where_no_mesh_is_set():
    sharding = NamedSharding(mesh(a=2).abstract_mesh, P("a"))
    with pytest.raises(UnsupportedLeafError, match="no mesh is set in this thread"):
        HANDLER.describe(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding))


def test_a_box_that_is_on_no_device_is_refused():
    leaf = jax.device_put(np.zeros((8,), np.float32), NamedSharding(mesh(a=2), P("a")))
    with pytest.raises(PluginError, match="internal error: no device of this process has"):
        HANDLER.view_on_host(leaf, [Box((3,), (5,))])


# --- any mesh and any spec


@st.composite
def shardings(draw):
    """Draw a mesh over devices in any order, an array shape, and a partition spec that fits both."""
    sizes = draw(st.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2), (4,), (2, 2), (2,), (1, 8), (2, 1, 3), (1,)]))
    order = draw(st.permutations(range(8)))[: math.prod(sizes)]
    names = tuple("xyz"[: len(sizes)])
    devices = Mesh(np.array(jax.devices())[list(order)].reshape(sizes), names)
    rank = draw(st.integers(0, 3))
    placed = draw(st.permutations(names))[: draw(st.integers(0, len(names)))] if rank else []
    axes: list[list[str]] = [[] for _ in range(rank)]
    for name in placed:
        axes[draw(st.integers(0, rank - 1))].append(name)
    shape = []
    for names_of_axis in axes:
        divisor = math.prod(devices.shape[name] for name in names_of_axis)
        shape.append(divisor * draw(st.integers(0, 3)))
    spec = P(*[tuple(part) if len(part) > 1 else part[0] if part else None for part in axes])
    return NamedSharding(devices, spec), tuple(shape)


@settings(deadline=None)
@given(shardings(), st.sampled_from(["float32", "bfloat16", "int4", "bool"]), shardings())
def test_boxes_make_up_the_array_under_any_sharding(saved, dtype, asked):
    sharding, shape = saved
    expected = numbers(shape, dtype)
    leaf = jax.device_put(expected, sharding)
    record = HANDLER.describe(leaf)
    parts = on_host(leaf)
    assert uncovered(record.spec, list(parts)) is None
    assert record.cuts == cuts_of(shape, parts)
    whole = np.zeros(shape, name_dtype := record.spec.numpy_dtype)
    for box, part in parts.items():
        assert part.dtype == name_dtype
        whole[box.slices] = part
    assert whole.tobytes() == expected.tobytes()
    assert name_of_dtype(leaf.dtype) == dtype

    other, other_shape = asked
    target = other if other_shape == shape else NamedSharding(other.mesh, P())
    for abstract in (leaf, jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=target)):
        built = HANDLER.build(abstract, record, read(whole, HANDLER.wanted(abstract, record)))
        assert built.sharding == abstract.sharding
        assert np.asarray(built).tobytes() == expected.tobytes()
        for shard in built.addressable_shards:
            assert np.asarray(shard.data).tobytes() == expected[shard.index].tobytes()
