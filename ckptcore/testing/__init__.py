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
            "arrays", "checkpointable_handlers", "collectives", "container_handlers", "coordinators", "coverage", "executors",
            "files_handlers",
            "layout_crashes", "layout_pieces", "layout_stores", "layout_trials", "layouts", "leaf_handlers", "matrix", "plugins", "storage",
            "storage_directories", "storage_model", "trees",
        )
    )
)  # fmt: skip

from ckptcore.testing import strategies
from ckptcore.testing.arrays import DTYPE_NAMES, PORTABLE_DTYPES, SHAPES, assert_same_bits, bit_patterns
from ckptcore.testing.checkpointable_handlers import CheckpointableExample, CheckpointableHandlerTests
from ckptcore.testing.collectives import CollectivesTests
from ckptcore.testing.container_handlers import ContainerExample, ContainerHandlerTests
from ckptcore.testing.coordinators import CoordinatorTests
from ckptcore.testing.executors import ExecutorTests
from ckptcore.testing.far_storage import FarRequest, FarStorage
from ckptcore.testing.fault_proxy import FaultProxy, LoggedRequest
from ckptcore.testing.faults import (
    CrashAt,
    FailAt,
    Fault,
    FaultPlan,
    FlipBitAt,
    FullAfter,
    Operation,
    ShortReadAt,
    SimulatedCrash,
)
from ckptcore.testing.faulty_storage import FaultyStorage, with_faults
from ckptcore.testing.files_handlers import FilesExample, FilesHandlerTests
from ckptcore.testing.host_memory import LateHostMemory
from ckptcore.testing.http_messages import HTTPAnswer, HTTPHead
from ckptcore.testing.layout_crashes import LayoutCrashTests
from ckptcore.testing.layout_forecasts import LayoutForecastTests
from ckptcore.testing.layout_pieces import LayoutPiecesTests
from ckptcore.testing.layouts import LayoutTests
from ckptcore.testing.leaf_handlers import LeafExample, LeafHandlerTests
from ckptcore.testing.matrix import SaveLoadMatrixTests, StorageMatrixTests
from ckptcore.testing.plugins import PluginTests
from ckptcore.testing.remote_arrays import RemoteArray, RemoteArrayHandler
from ckptcore.testing.request_faults import (
    CutContent,
    DeliverLater,
    Duplicate,
    InterruptAfter,
    InterruptBefore,
    LoseAnswer,
    ProxiedRequest,
    RepeatLater,
    RequestFault,
    RequestPlan,
    RequestsFailing,
    ResetAnswer,
    ResetRequest,
    SeededFaults,
    StaleList,
    StoreDialect,
    Throttle,
    TruncateAnswer,
    Wait,
)
from ckptcore.testing.samples import (
    ContainerSample,
    FrameworkSample,
    LayoutSample,
    Samples,
    StorageSample,
    installed_samples,
)
from ckptcore.testing.simulated_disk import SimulatedDisk
from ckptcore.testing.simulated_storage import open_simulated
from ckptcore.testing.storage import StorageBackendTests
from ckptcore.testing.storage_deletions import RepeatsDeletionsTests
from ckptcore.testing.storage_directories import AtomicDirectoriesTests
from ckptcore.testing.storage_writers import CreatesObjectsTests, HoldsUploadsTests
from ckptcore.testing.thread_collectives import ThreadCollectives, ThreadNetwork
from ckptcore.testing.thread_coordinator import ThreadCoordinator, ThreadJob
from ckptcore.testing.trees import assert_same_tree, assert_same_value
from ckptcore.testing.worker_processes import Crossing, Elements, WorkerProcesses

__all__ = [
    "DTYPE_NAMES",
    "PORTABLE_DTYPES",
    "SHAPES",
    "AtomicDirectoriesTests",
    "CheckpointableExample",
    "CheckpointableHandlerTests",
    "CollectivesTests",
    "ContainerExample",
    "ContainerHandlerTests",
    "ContainerSample",
    "CoordinatorTests",
    "CrashAt",
    "CreatesObjectsTests",
    "Crossing",
    "CutContent",
    "DeliverLater",
    "Duplicate",
    "Elements",
    "ExecutorTests",
    "FailAt",
    "FarRequest",
    "FarStorage",
    "Fault",
    "FaultPlan",
    "FaultProxy",
    "FaultyStorage",
    "FilesExample",
    "FilesHandlerTests",
    "FlipBitAt",
    "FrameworkSample",
    "FullAfter",
    "HTTPAnswer",
    "HTTPHead",
    "HoldsUploadsTests",
    "InterruptAfter",
    "InterruptBefore",
    "LateHostMemory",
    "LayoutCrashTests",
    "LayoutForecastTests",
    "LayoutPiecesTests",
    "LayoutSample",
    "LayoutTests",
    "LeafExample",
    "LeafHandlerTests",
    "LoggedRequest",
    "LoseAnswer",
    "Operation",
    "PluginTests",
    "ProxiedRequest",
    "RemoteArray",
    "RemoteArrayHandler",
    "RepeatLater",
    "RepeatsDeletionsTests",
    "RequestFault",
    "RequestPlan",
    "RequestsFailing",
    "ResetAnswer",
    "ResetRequest",
    "Samples",
    "SaveLoadMatrixTests",
    "SeededFaults",
    "ShortReadAt",
    "SimulatedCrash",
    "SimulatedDisk",
    "StaleList",
    "StorageBackendTests",
    "StorageMatrixTests",
    "StorageSample",
    "StoreDialect",
    "ThreadCollectives",
    "ThreadCoordinator",
    "ThreadJob",
    "ThreadNetwork",
    "Throttle",
    "TruncateAnswer",
    "Wait",
    "WorkerProcesses",
    "assert_same_bits",
    "assert_same_tree",
    "assert_same_value",
    "bit_patterns",
    "installed_samples",
    "open_simulated",
    "strategies",
    "with_faults",
]
