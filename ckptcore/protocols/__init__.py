"""The protocols: what a leaf handler, container, checkpointable, layout, storage and coordinator is.

::

    values        handlers of leaves, containers and checkpointables
    layouts       layouts, and the stores they write and read
    storage       storages and what some can do on top
    coordination  the processes of a job
"""

from ckptcore.protocols.coordination import (
    Coordinator,
)
from ckptcore.protocols.layouts import (
    About,
    InspectedComposite,
    Inspection,
    InspectsComposites,
    Layout,
    LayoutFactory,
    MarksCheckpoints,
    MemberKind,
    ReadsChunks,
    ReadStore,
    SharesReplicas,
    Snapshot,
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
    FilesHandler,
    Flattened,
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
    "CheckpointableHandler",
    "ContainerHandler",
    "Continuation",
    "Coordinator",
    "FilesHandler",
    "Flattened",
    "HostMemory",
    "IfAbsent",
    "IfTag",
    "InspectedComposite",
    "Inspection",
    "InspectsComposites",
    "Layout",
    "LayoutFactory",
    "LazyCheckpointableHandler",
    "LeafHandler",
    "MarksCheckpoints",
    "MemberKind",
    "ObjectWriter",
    "OpensObjects",
    "PerProcessHandler",
    "Priority",
    "PutCondition",
    "RangeReader",
    "ReadStore",
    "ReadsChunks",
    "SharesReplicas",
    "Snapshot",
    "StatefulCheckpointable",
    "StorageAddress",
    "StorageBackend",
    "StorageOpener",
    "StorageOptions",
    "WriteStore",
    "WritesRuns",
]
