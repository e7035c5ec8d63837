"""Conformance tests of the executor over JAX's colocated Python."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from ckptcore_jax import ColocatedExecutor
from ckptcore_jax.executor_tests import ExecutorTests
from ckptcore_jax.leaves import JaxLeafHandler
from ckptcore_jax.staged_executor import StagedExecutor
from ckptcore_jax.worker_saves import LeavesAtWorkers
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ckptcore.model import ArraySpec, HostArray
from ckptcore.protocols import LeafHandler


def two_workers() -> ColocatedExecutor:
    """Return an executor with two workers, which share the devices of this process."""
    devices = jax.devices()
    return ColocatedExecutor([devices[:4], devices[4:]])


@pytest.fixture(scope="module")
def reached() -> ColocatedExecutor:
    return two_workers()


class TestColocatedExecutor(ExecutorTests):
    @pytest.fixture
    def executor(self, reached: ColocatedExecutor) -> StagedExecutor:
        return reached

    def split(self, executor: StagedExecutor, elements: HostArray) -> Any:
        return jax.device_put(elements, self.sharding("host", "device"))

    def replicated(self, executor: StagedExecutor, elements: HostArray) -> Any:
        return jax.device_put(elements, self.sharding())

    def alone(self, executor: StagedExecutor, elements: HostArray) -> Any:
        return jax.device_put(elements, jax.devices()[0])

    def elements(self, executor: StagedExecutor, leaf: Any) -> HostArray:
        return np.asarray(leaf)

    def disturb(self, executor: StagedExecutor, leaf: Any) -> None:
        leaf.delete()

    def abstract(self, executor: StagedExecutor, spec: ArraySpec) -> Any:
        return jax.ShapeDtypeStruct(spec.shape, spec.numpy_dtype, sharding=self.sharding("host", "device"))

    @staticmethod
    def sharding(*axes: str | None) -> NamedSharding:
        mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("host", "device", "other"))
        return NamedSharding(mesh, PartitionSpec(*axes))


def test_the_handler_of_a_controller_forwards_every_method() -> None:
    names = {name for name in vars(LeafHandler) if not name.startswith("_")}
    assert {"fill", "shards_of"} <= names
    assert not {name for name in names if getattr(LeavesAtWorkers, name) is getattr(LeafHandler, name)}


def test_a_controller_holds_no_box_of_leaves_at_workers(reached: ColocatedExecutor) -> None:
    """Other leaves have the shards of the wrapped handler, for any process."""
    handler = reached.leaves_to_save(JaxLeafHandler())
    at_workers = jax.device_put(np.zeros((4, 4)), TestColocatedExecutor.sharding("host", "device"))
    assert handler.shards_of(at_workers, None, 0, 1) == handler.shards(at_workers, 0, 1) == ()
    here = jax.ShapeDtypeStruct((3,), np.dtype("float32"))
    assert handler.shards_of(here, 5, 1, 2) == JaxLeafHandler().shards_of(here, 5, 1, 2) != ()
    assert handler.keeps_memory(here) == JaxLeafHandler().keeps_memory(here)
