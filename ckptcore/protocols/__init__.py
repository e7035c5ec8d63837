"""The protocols: what a leaf handler, container, checkpointable, layout, storage, coordinator and executor is.

::

    values        handlers of leaves, containers and checkpointables
    layouts       layouts, and the stores they write and read
    storage       storages and what some can do on top
    coordination  the processes of a job
    execution     the workers of a single controller
    collectives   how they send each other elements
"""

from ckptcore.protocols.collectives import (
    Channels,
    Collectives,
)
from ckptcore.protocols.coordination import (
    Coordinator,
    GathersInGroups,
    Rejoinable,
)
from ckptcore.protocols.execution import (
    Executor,
    Fetched,
    Held,
    LeafBoxes,
    ReadStage,
    WantedLeaf,
    WriteStage,
)
from ckptcore.protocols.layouts import (
    About,
    ForecastsWrites,
    InspectedComposite,
    Inspection,
    InspectsComposites,
    Layout,
    LayoutFactory,
    MarksCheckpoints,
    MemberKind,
    PlacesTiles,
    ReadsChunks,
    ReadStore,
    SharesReplicas,
    Snapshot,
    WriteForecast,
    WritesRuns,
    WriteStore,
)
from ckptcore.protocols.storage import (
    IF_ABSENT,
    AtomicDirectories,
    Buffer,
    IfAbsent,
    IfTag,
    ObjectWriter,
    OpensObjects,
    PutCondition,
    RangeReader,
    StorageAddress,
    StorageBackend,
    StorageOpener,
    StorageOptions,
)
from ckptcore.protocols.values import (
    CheckpointableHandler,
    ContainerHandler,
    Continuation,
    CountsReplicas,
    FilesHandler,
    Flattened,
    ForecastsLeaves,
    HostBytes,
    HostMemory,
    LazyCheckpointableHandler,
    LeafHandler,
    PerProcessHandler,
    Priority,
    StatefulCheckpointable,
)

__all__ = [
    "IF_ABSENT",
    "About",
    "AtomicDirectories",
    "Buffer",
    "Channels",
    "CheckpointableHandler",
    "Collectives",
    "ContainerHandler",
    "Continuation",
    "Coordinator",
    "CountsReplicas",
    "Executor",
    "Fetched",
    "FilesHandler",
    "Flattened",
    "ForecastsLeaves",
    "ForecastsWrites",
    "GathersInGroups",
    "Held",
    "HostBytes",
    "HostMemory",
    "IfAbsent",
    "IfTag",
    "InspectedComposite",
    "Inspection",
    "InspectsComposites",
    "Layout",
    "LayoutFactory",
    "LazyCheckpointableHandler",
    "LeafBoxes",
    "LeafHandler",
    "MarksCheckpoints",
    "MemberKind",
    "ObjectWriter",
    "OpensObjects",
    "PerProcessHandler",
    "PlacesTiles",
    "Priority",
    "PutCondition",
    "RangeReader",
    "ReadStage",
    "ReadStore",
    "ReadsChunks",
    "Rejoinable",
    "SharesReplicas",
    "Snapshot",
    "StatefulCheckpointable",
    "StorageAddress",
    "StorageBackend",
    "StorageOpener",
    "StorageOptions",
    "WantedLeaf",
    "WriteForecast",
    "WriteStage",
    "WriteStore",
    "WritesRuns",
]
