"""Tools for testing plugins: conformance tests to inherit, fakes, fault injection, Hypothesis strategies.

Requires pytest and Hypothesis (``pip install 'ckptcore[testing]'``). Subclass a test class and define the attributes
and methods that its docstring requires; pytest then collects its tests::

    class TestTensors(ckptcore_testing.LeafHandlerTests):
        handler = TensorHandler()
        examples = (LeafExample("vector", make=..., expected=..., elements=...),)
"""

from __future__ import annotations

import pytest

# Register the modules before they are imported, so that failed asserts show the compared values.
pytest.register_assert_rewrite(
    *(
        f"{__name__}.{module}"
        for module in (
            "arrays", "begin_observers", "cases", "channels", "checkpointable_handlers", "collectives",
            "container_handlers", "coordinators", "coverage", "files_handlers", "layout_chains", "layout_crashes",
            "layout_pieces", "layout_stores", "layout_trials", "layouts", "leaf_handlers", "matrix", "plugins",
            "run_directories", "storage", "storage_directories", "storage_model", "trees",
        )
    )
)  # fmt: skip

from ckptcore_testing import strategies
from ckptcore_testing.arrays import DTYPE_NAMES, PORTABLE_DTYPES, SHAPES, assert_same_bits, bit_patterns
from ckptcore_testing.begin_observers import BeginObserverTests
from ckptcore_testing.channels import ChannelTests
from ckptcore_testing.checkpointable_handlers import CheckpointableExample, CheckpointableHandlerTests
from ckptcore_testing.collectives import CollectivesTests
from ckptcore_testing.container_handlers import ContainerExample, ContainerHandlerTests
from ckptcore_testing.coordinators import CoordinatorTests
from ckptcore_testing.far_storage import FarRequest, FarStorage
from ckptcore_testing.fault_proxy import FaultProxy, LoggedRequest
from ckptcore_testing.faults import (
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
from ckptcore_testing.faulty_storage import FaultyStorage, with_faults
from ckptcore_testing.files_handlers import FilesExample, FilesHandlerTests
from ckptcore_testing.host_memory import LateHostMemory
from ckptcore_testing.http_messages import HTTPAnswer, HTTPHead
from ckptcore_testing.layout_chains import LayoutChainTests
from ckptcore_testing.layout_crashes import LayoutCrashTests
from ckptcore_testing.layout_forecasts import LayoutForecastTests
from ckptcore_testing.layout_pieces import LayoutPiecesTests
from ckptcore_testing.layouts import LayoutTests
from ckptcore_testing.leaf_handlers import LeafExample, LeafHandlerTests
from ckptcore_testing.matrix import SaveLoadMatrixTests, StorageMatrixTests
from ckptcore_testing.plugins import PluginTests
from ckptcore_testing.request_faults import (
    CutContent,
    DeliverLater,
    Duplicate,
    InterruptAfter,
    InterruptBefore,
    LoseAnswer,
    ProxiedRequest,
    Refuse,
    Refusing,
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
from ckptcore_testing.run_directories import RunDirectoryTests
from ckptcore_testing.samples import (
    ContainerSample,
    FrameworkSample,
    LayoutSample,
    Samples,
    StorageSample,
    installed_samples,
)
from ckptcore_testing.simulated_disk import SimulatedDisk
from ckptcore_testing.simulated_storage import open_simulated
from ckptcore_testing.storage import StorageBackendTests
from ckptcore_testing.storage_directories import AtomicDirectoriesTests
from ckptcore_testing.storage_writers import NewObjectTests, UploadsTests
from ckptcore_testing.thread_collectives import ThreadCollectives, ThreadNetwork
from ckptcore_testing.thread_coordinator import ThreadCoordinator, ThreadJob, run_ranks
from ckptcore_testing.trees import assert_same_tree, assert_same_value

__all__ = [
    "DTYPE_NAMES",
    "PORTABLE_DTYPES",
    "SHAPES",
    "AtomicDirectoriesTests",
    "BeginObserverTests",
    "ChannelTests",
    "CheckpointableExample",
    "CheckpointableHandlerTests",
    "CollectivesTests",
    "ContainerExample",
    "ContainerHandlerTests",
    "ContainerSample",
    "CoordinatorTests",
    "CrashAt",
    "CutContent",
    "DeliverLater",
    "Duplicate",
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
    "InterruptAfter",
    "InterruptBefore",
    "LateHostMemory",
    "LayoutChainTests",
    "LayoutCrashTests",
    "LayoutForecastTests",
    "LayoutPiecesTests",
    "LayoutSample",
    "LayoutTests",
    "LeafExample",
    "LeafHandlerTests",
    "LoggedRequest",
    "LoseAnswer",
    "NewObjectTests",
    "Operation",
    "PluginTests",
    "ProxiedRequest",
    "Refuse",
    "Refusing",
    "RepeatLater",
    "RequestFault",
    "RequestPlan",
    "RequestsFailing",
    "ResetAnswer",
    "ResetRequest",
    "RunDirectoryTests",
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
    "UploadsTests",
    "Wait",
    "assert_same_bits",
    "assert_same_tree",
    "assert_same_value",
    "bit_patterns",
    "installed_samples",
    "open_simulated",
    "run_ranks",
    "strategies",
    "with_faults",
]
