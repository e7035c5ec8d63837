"""Random chains of transforms on random trees, loaded onto random shardings of JAX devices."""

# mypy: allow-untyped-calls

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from ckptcore_jax.testing import enable_x64
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckptcore
from ckptcore import Context
from ckptcore.context import MemoryOptions
from plugins.transforms.tests.chains import chains, save_beside, stored_trees


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_chains_are_loaded_onto_random_shardings(data: st.DataObject) -> None:
    stored = data.draw(stored_trees())
    chain = data.draw(chains(stored))
    location = "memory://jax-transforms/chains"
    ckptcore.save(location, dict(stored), overwrite="non-atomic")
    save_beside(chain)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("two", "four"))
    abstract: Any = ckptcore.metadata(location, transforms=chain.transforms).abstract
    with enable_x64():
        for path, part in chain.tree.items():
            axes: list[str | None] = []
            for extent in part.elements.shape:
                fitting = [name for name, size in mesh.shape.items() if extent % size == 0 and name not in axes]
                axes.append(data.draw(st.sampled_from([None, *fitting])))
            sharding = NamedSharding(mesh, PartitionSpec(*axes))
            holder, key = _keys(abstract, path)
            holder[key] = jax.ShapeDtypeStruct(part.elements.shape, part.elements.dtype, sharding=sharding)
        memory = MemoryOptions(load_bytes=data.draw(st.sampled_from([None, 1, 64])))
        loaded = ckptcore.load(location, abstract, transforms=chain.transforms, context=Context(memory=memory))
        for path, part in chain.tree.items():
            holder, key = _keys(loaded, path)
            assert np.asarray(holder[key]).tobytes() == part.elements.tobytes()


def _keys(tree: Any, path: str) -> tuple[Any, str]:
    """Return the container of the value at a path, and its key in it. Keys may contain ``/``."""
    if path in tree:
        return tree, path
    first, _, rest = path.partition("/")
    return _keys(tree[first], rest)
