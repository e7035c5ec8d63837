"""Samples of JAX arrays for the matrix of frameworks, layouts and storages of `ckptcore_testing`. Imports JAX."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from ckptcore_testing import DTYPE_NAMES, ContainerSample, FrameworkSample
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ckptcore.model import ArraySpec, HostArray
from ckptcore_jax.leaves import UNSUPPORTED_DTYPES


@functools.partial(jax.tree_util.register_dataclass, data_fields=["first", "second"], meta_fields=["name"])
@dataclasses.dataclass
class _Registered:
    first: Any
    second: Any
    name: str = "static"


@jax.tree_util.register_pytree_node_class
class _WithoutKeys:
    def __init__(self, first: Any, second: Any) -> None:
        self.children = (first, second)

    def tree_flatten(self) -> tuple[Sequence[Any], None]:
        return self.children, None

    @classmethod
    def tree_unflatten(cls, static: None, children: Sequence[Any]) -> _WithoutKeys:
        return cls(*children)


def _sharding(shape: tuple[int, ...]) -> NamedSharding:
    """Return a sharding over all devices along the first divisible axis. Without such an axis, it is replicated."""
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    spec: Any = PartitionSpec  # the constructor is untyped in JAX
    for axis, extent in enumerate(shape):
        if extent % mesh.size == 0:
            return NamedSharding(mesh, spec(*[None] * axis, "devices"))
    return NamedSharding(mesh, spec())


def _make_sharded(elements: HostArray) -> Any:
    return jax.device_put(jnp.array(elements), _sharding(elements.shape))


def _abstract(spec: ArraySpec, sharding: NamedSharding | None = None) -> Any:
    make: Any = jax.ShapeDtypeStruct  # the constructor is untyped in JAX
    return make(spec.shape, spec.numpy_dtype, sharding=sharding)


def enable_x64() -> Any:
    """Return a context manager that enables 64-bit dtypes."""
    import jax.experimental

    module: Any = jax if hasattr(jax, "enable_x64") else jax.experimental  # its place in older versions
    return module.enable_x64(True)


def host_memory() -> str:
    """Return the memory kind for offloaded arrays. Before version 0.7, JAX has only one memory kind on CPUs."""
    kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
    return "pinned_host" if "pinned_host" in kinds else str(jax.devices()[0].default_memory().kind)


_DTYPES: Final = tuple([name for name in DTYPE_NAMES if hasattr(jnp, name) and name not in UNSUPPORTED_DTYPES])
_PARTIAL: Final[Any] = jax.tree_util.Partial

SAMPLE: Final = FrameworkSample(
    name="jax",
    dtypes=_DTYPES,
    make=jnp.array,
    abstract=_abstract,
    elements=np.asarray,
    array_type=jax.Array,
    fills=False,
    containers=(
        ContainerSample("dataclass", lambda two: _Registered(*two), lambda made: [made.first, made.second]),
        ContainerSample("without keys", lambda two: _WithoutKeys(*two), lambda made: list(made.children)),
        ContainerSample(
            "Partial",
            lambda two: _PARTIAL(max, two[0], second=two[1]),
            lambda made: [*made.args, *made.keywords.values()],
        ),
    ),
    session=enable_x64,
)
"""Arrays on the default device, and registered containers."""

SHARDED: Final = FrameworkSample(
    name="jax-sharded",
    dtypes=_DTYPES,
    make=_make_sharded,
    abstract=lambda spec: _abstract(spec, _sharding(spec.shape)),
    elements=np.asarray,
    array_type=jax.Array,
    fills=False,
    session=enable_x64,
)
"""Arrays sharded over all devices."""
