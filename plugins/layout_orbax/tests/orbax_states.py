"""States that ckptcore and Orbax exchange, the expected results, and comparisons bit for bit."""

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import torch
from ckptcore_orbax import ArrayRule, OcdbtLayout, Zarr3Layout, ZarrLayout
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1

DTYPES = (
    "bool", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float16", "bfloat16", "float32", "complex64",
)  # fmt: skip
"""Dtypes of JAX without 64-bit types."""

WIDE = ("int64", "uint64", "float64", "complex128")

LAYOUTS = {
    "ocdbt": OcdbtLayout(),
    "ocdbt-zarr2": OcdbtLayout(zarr_format=2),
    "ocdbt-zstd": OcdbtLayout(compression="zstd"),
    "ocdbt-blosc": OcdbtLayout(compression="blosc"),
    "ocdbt-zarr2-zstd": OcdbtLayout(zarr_format=2, compression="zstd:1"),
    "ocdbt-pieces": OcdbtLayout(chunk_bytes=16, data_file_bytes=100),
    "ocdbt-unchecked": OcdbtLayout(checksum=False),
    "ocdbt-rules": OcdbtLayout(
        rules=[
            ArrayRule(pattern="arrays.*", compression="zstd:5"),
            ArrayRule(pattern="*32", chunk_bytes=8, checksum=False),
        ]
    ),
    "zarr3": Zarr3Layout(),
    "zarr3-zstd": Zarr3Layout(compression="zstd", chunk_bytes=8),
    "zarr3-unchecked": Zarr3Layout(checksum=False, chunk_bytes=8),
    "zarr": ZarrLayout(),
    "zarr-blosc": ZarrLayout(compression="blosc", chunk_bytes=8),
}
"""Layouts with different options, by name."""

FEW = ("ocdbt", "ocdbt-zarr2", "ocdbt-pieces", "zarr3", "zarr")
"""The entries of `LAYOUTS` that differ most from each other."""


def numbers(dtype, shape=(2, 3), start=1):
    """Return a NumPy array with the numbers from `start` on."""
    count = np.arange(np.prod(shape, dtype=np.int64)) + start
    return (count % 2 if dtype == "bool" else count % 7).astype(getattr(ml_dtypes, dtype, dtype)).reshape(shape)


def small_values():
    return {
        "true": True,
        "false": False,
        "int": -5,
        "float": 0.1,
        "text": "größe\n",
        "with.dot/slash": "a",
        "none": None,
    }


def jax_state():
    """Return a state with every dtype of JAX, random keys, nested and empty containers, and Python values."""
    return {
        "arrays": {dtype: jnp.asarray(numbers(dtype)) for dtype in DTYPES},
        "zero_d": jnp.float32(0.3),
        "specials": jnp.asarray([np.nan, -np.nan, np.inf, -np.inf, -0.0, 1e-45], jnp.float32),
        "large": jnp.arange(60, dtype=jnp.float32).reshape(5, 3, 4),
        "nested": {"list": [jnp.ones(2), {"x": jnp.arange(3)}, [jnp.zeros((1, 1)), 7]], "tuple": (jnp.ones(1), "text")},
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4, impl="rbg"), (2, 3)),
        "old_key": jax.random.PRNGKey(5),
        "values": small_values(),
        "empty": {"dict": {}, "list": [], "none": None},
    }


def numpy_state():
    """Return a state with every dtype of NumPy and ml_dtypes, and with several strides."""
    return {
        "arrays": {dtype: numbers(dtype) for dtype in (*DTYPES, *WIDE)},
        "zero_d": np.asarray(0.3),
        "empty": np.zeros((0, 3), np.float32),
        "columns": np.asfortranarray(numbers("float64", (4, 5))),
        "backwards": np.arange(10, dtype=np.int16)[::-2],
        "layers": [{"w": numbers("float32", (3,), layer)} for layer in range(11)],
        "values": small_values(),
    }


def torch_state():
    """Return a state with tensors: contiguous, strided, empty, of dtypes that NumPy lacks, and a parameter."""
    base = torch.arange(12.0).reshape(3, 4)
    return {
        "weight": torch.nn.Parameter(base),
        "transposed": base.T,
        "half": torch.ones(3, dtype=torch.bfloat16),
        "float8": torch.arange(4.0).to(torch.float8_e4m3fn),
        "wide": torch.arange(4),
        "flag": torch.tensor(True),
        "empty": torch.zeros(0),
        "groups": [{"lr": 0.1, "params": [0, 1], "betas": (0.9, 0.99)}],
    }


STATES = {"jax": jax_state, "numpy": numpy_state, "torch": torch_state}


def sharded_state():
    """Return arrays on eight devices: sharded along one or two axes, by both mesh axes on one axis, and replicated."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh, line = (
        jax.make_mesh((4, 2), ("data", "model"), axis_types=auto),
        jax.make_mesh((8,), ("x",), axis_types=auto[:1]),
    )
    four = jax.sharding.Mesh(np.asarray(jax.devices()[:4]), ("x",))

    def placed(array, mesh, *spec):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    numbers = jnp.arange(64.0).reshape(8, 8)
    return {
        "rows": placed(numbers, mesh, "data"),
        "columns": placed(numbers, mesh, None, "model"),
        "tiles": placed(numbers.astype(jnp.bfloat16), mesh, "data", "model"),
        "both": placed(numbers, mesh, ("data", "model")),
        "turned": placed(numbers, mesh, "model", "data"),
        "line": placed(numbers.reshape(64), line, "x"),
        "four": placed(numbers, four, "x"),
        "whole": placed(numbers, mesh),
        "scalar": placed(jnp.float32(2), mesh),
        "keys": placed(jax.random.split(jax.random.key(0), 8), mesh, "data"),
        "one": jnp.arange(3),
    }


class Iterator:
    """An object that writes its own files, with a protocol that Orbax, Grain and ckptcore support."""

    def __init__(self, position):
        self.position = position

    async def save(self, directory):
        position = self.position

        async def write():
            path = await directory.await_creation() if hasattr(directory, "await_creation") else directory
            (path / "position.json").write_text(json.dumps(position))

        return write()

    async def load(self, directory):
        async def read():
            self.position = json.loads((directory / "position.json").read_text())

        return read()


def saving(**options):
    """Return the context of a save with the API version 1 of Orbax."""
    storage = v1.options.ArrayOptions.Saving.StorageOptions(**options.pop("storage", {}))
    array = v1.options.ArrayOptions.Saving(storage_options=storage, **options)
    return v1.Context(array_options=v1.options.ArrayOptions(saving=array))


def by_version_1(**options):
    def save(location, state):
        with saving(**options):
            v1.save(location, state)

    return save


def by_version_0(handler, args):
    def save(location, state):
        with ocp.Checkpointer(handler()) as checkpointer:
            checkpointer.save(location, args=args(state))

    return save


def seen_by_orbax(value):
    """Return the value that Orbax loads if ckptcore saved this one: Orbax has fewer types of containers and leaves."""
    if isinstance(value, dict):
        return {str(key): seen_by_orbax(child) for key, child in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: seen_by_orbax(child) for name, child in zip(value._fields, value, strict=True)}
    if isinstance(value, list | tuple):
        return [seen_by_orbax(child) for child in value]
    if isinstance(value, torch.Tensor):
        plain = value.detach().contiguous()
        name = str(plain.dtype).removeprefix("torch.")
        if not hasattr(ml_dtypes, name):
            return plain.numpy()
        return plain.reshape(-1).view(torch.uint8).numpy().view(getattr(ml_dtypes, name)).reshape(plain.shape)
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        # tensorstore has no unsigned 4-bit elements in any zarr version.
        return value.astype("uint8") if value.dtype == "uint4" else value if value.shape else value[()]
    return value


def host(tree):
    """Replace JAX arrays by NumPy arrays, and random keys by their data."""

    def plain(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)

    return jax.tree.map(plain, tree, is_leaf=lambda leaf: leaf is None)


def assert_same(actual, expected, where=""):
    """Assert equal containers, types, dtypes, shapes and bits."""
    if isinstance(expected, dict):
        assert isinstance(actual, dict), f"{where}: {type(actual)} is not a dict"
        assert set(actual) == set(expected), f"{where}: {sorted(actual)} is not {sorted(expected)}"
        for key, child in expected.items():
            assert_same(actual[key], child, f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        # Orbax returns the keys of an empty tuple as an empty tuple.
        assert isinstance(actual, type(expected)), f"{where}: {type(actual)} is not {type(expected)}"
        assert len(actual) == len(expected), f"{where}: {len(actual)} is not {len(expected)}"
        for number, (child, expected_child) in enumerate(zip(actual, expected, strict=True)):
            assert_same(child, expected_child, f"{where}/{number}")
    elif isinstance(expected, jax.Array):
        assert isinstance(actual, jax.Array), f"{where}: {type(actual)} is not an array of JAX"
        assert actual.dtype == expected.dtype, f"{where}: {actual.dtype} is not {expected.dtype}"
        if jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
            actual, expected = jax.random.key_data(actual), jax.random.key_data(expected)
        _assert_same_bits(np.asarray(actual), np.asarray(expected), where)
    elif isinstance(expected, np.ndarray | np.generic):
        assert isinstance(actual, np.ndarray | np.generic), f"{where}: {type(actual)} is not of NumPy"
        assert isinstance(expected, np.ndarray) <= isinstance(actual, np.ndarray) or not expected.shape, where
        _assert_same_bits(np.asarray(actual), np.asarray(expected), where)
    else:
        assert type(actual) is type(expected), f"{where}: {type(actual)} is not {type(expected)}"
        assert actual == expected, f"{where}: {actual!r} is not {expected!r}"


def _assert_same_bits(actual, expected, where):
    little = expected.dtype.newbyteorder("=")
    assert actual.dtype == little, f"{where}: {actual.dtype} is not {little}"
    assert actual.shape == expected.shape, f"{where}: {actual.shape} is not {expected.shape}"
    assert actual.tobytes() == expected.astype(little).tobytes(), f"{where}: {actual} is not {expected}"


def abstract_of(tree, array):
    """Replace the arrays of a state by `array(leaf)`."""
    return jax.tree.map(
        lambda leaf: array(leaf) if hasattr(leaf, "shape") else leaf, tree, is_leaf=lambda leaf: leaf is None
    )


def files_of(location):
    """Return the contents of all files below a directory, by relative name."""
    return {
        str(path.relative_to(location)): path.read_bytes()
        for path in sorted(Path(location).rglob("*"))
        if path.is_file()
    }


def flipped(path, position, bit=0):
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def places_of(path, content):
    """Yield each position of some bytes in a file."""
    data, position = path.read_bytes(), -1
    for _ in itertools.count():
        if (position := data.find(content, position + 1)) < 0:
            return
        yield position
