"""What plugin authors test their plugins with: conformance classes to inherit, fakes, Hypothesis strategies.

Needs pytest and Hypothesis (``pip install ckptcore[testing]``); ``import ckptcore`` does not import it. Inherit a class,
give it what its docstring asks for, and pytest collects its tests::

    class TestTensors(ckptcore.testing.LeafHandlerTests):
        handler = TensorHandler()
        examples = (LeafExample("vector", make=..., expected=..., elements=...),)
"""

from __future__ import annotations

import pytest

# Before the modules are imported: their asserts then say what was compared.
pytest.register_assert_rewrite(
    *(
        f"{__name__}.{module}"
        for module in (
            "arrays", "checkpointable_handlers", "container_handlers", "coordinators", "coverage", "layout_crashes",
            "layout_stores", "layout_trials", "layouts", "leaf_handlers", "matrix", "plugins", "storage",
        )
    )
)  # fmt: skip

from ckptcore.testing import strategies
from ckptcore.testing.arrays import DTYPE_NAMES, PORTABLE_DTYPES, SHAPES, assert_same_bits, bit_patterns
from ckptcore.testing.checkpointable_handlers import CheckpointableExample, CheckpointableHandlerTests
from ckptcore.testing.container_handlers import ContainerExample, ContainerHandlerTests
from ckptcore.testing.coordinators import CoordinatorTests
from ckptcore.testing.host_memory import LateHostMemory
from ckptcore.testing.layouts import LayoutTests
from ckptcore.testing.leaf_handlers import LeafExample, LeafHandlerTests
from ckptcore.testing.matrix import SaveLoadMatrixTests
from ckptcore.testing.plugins import PluginTests
from ckptcore.testing.samples import (
    ContainerSample,
    FrameworkSample,
    LayoutSample,
    Samples,
    StorageSample,
    installed_samples,
)
from ckptcore.testing.thread_coordinator import ThreadCoordinator, ThreadJob

__all__ = [
    "DTYPE_NAMES",
    "PORTABLE_DTYPES",
    "SHAPES",
    "CheckpointableExample",
    "CheckpointableHandlerTests",
    "ContainerExample",
    "ContainerHandlerTests",
    "ContainerSample",
    "CoordinatorTests",
    "FrameworkSample",
    "LateHostMemory",
    "LayoutSample",
    "LayoutTests",
    "LeafExample",
    "LeafHandlerTests",
    "PluginTests",
    "Samples",
    "SaveLoadMatrixTests",
    "StorageSample",
    "ThreadCoordinator",
    "ThreadJob",
    "assert_same_bits",
    "bit_patterns",
    "installed_samples",
    "strategies",
]
