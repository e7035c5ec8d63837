"""The protocols that plugins implement.

::

    values         handlers of leaves, containers and checkpointables
    layouts        layouts, and the stores that they write and read
    storage        storages
    transaction    the right to write a checkpoint, and its commit
    strategy       strategies of saves
    read_strategy  strategies of loads
    job            the processes of a job, their messages, and the workers of a single controller
    transforms     changes of a tree while it is loaded, and derived arrays
"""

from ckptcore.protocols.job import (
    Channels,
    Collectives,
    Coordinator,
    Executor,
    GathersInGroups,
    Rejoinable,
    ReportsAwaited,
)
from ckptcore.protocols.layouts import (
    CheckpointInfo,
    ChunkIndex,
    InspectedComposite,
    Inspection,
    Layout,
    LayoutCapabilities,
    LayoutFactory,
    MemberKind,
    NativeReader,
    ReadStore,
    Snapshot,
    WriteStore,
)
from ckptcore.protocols.read_strategy import ReadBoxes, ReadStrategy, ReadThrough, StagedLoad
from ckptcore.protocols.storage import (
    IF_ABSENT,
    AtomicDirectories,
    Buffer,
    DirectoryFeatures,
    DirectoryLock,
    IfAbsent,
    IfTag,
    NameForm,
    ObjectWriter,
    PlaceLimits,
    PutCondition,
    RangeReader,
    StampedReader,
    StorageAddress,
    StorageBackend,
    StorageCapabilities,
    StorageOpener,
    StorageOptions,
)
from ckptcore.protocols.strategy import SaveCommit, SaveStrategy, StepStrategy
from ckptcore.protocols.transaction import Transaction
from ckptcore.protocols.transforms import (
    DerivedArray,
    DerivedTree,
    Part,
    Transform,
    TransformedTree,
    Transforms,
    TransformSource,
)
from ckptcore.protocols.values import (
    AbstractLeaves,
    CheckpointableHandler,
    ContainerHandler,
    Continuation,
    FilesHandler,
    Flattened,
    HostBytes,
    HostMemory,
    LeafHandler,
    Priority,
    StatefulCheckpointable,
)

__all__ = [
    "IF_ABSENT",
    "AbstractLeaves",
    "AtomicDirectories",
    "Buffer",
    "Channels",
    "CheckpointInfo",
    "CheckpointableHandler",
    "ChunkIndex",
    "Collectives",
    "ContainerHandler",
    "Continuation",
    "Coordinator",
    "DerivedArray",
    "DerivedTree",
    "DirectoryFeatures",
    "DirectoryLock",
    "Executor",
    "FilesHandler",
    "Flattened",
    "GathersInGroups",
    "HostBytes",
    "HostMemory",
    "IfAbsent",
    "IfTag",
    "InspectedComposite",
    "Inspection",
    "Layout",
    "LayoutCapabilities",
    "LayoutFactory",
    "LeafHandler",
    "MemberKind",
    "NameForm",
    "NativeReader",
    "ObjectWriter",
    "Part",
    "PlaceLimits",
    "Priority",
    "PutCondition",
    "RangeReader",
    "ReadBoxes",
    "ReadStore",
    "ReadStrategy",
    "ReadThrough",
    "Rejoinable",
    "ReportsAwaited",
    "SaveCommit",
    "SaveStrategy",
    "Snapshot",
    "StagedLoad",
    "StampedReader",
    "StatefulCheckpointable",
    "StepStrategy",
    "StorageAddress",
    "StorageBackend",
    "StorageCapabilities",
    "StorageOpener",
    "StorageOptions",
    "Transaction",
    "Transform",
    "TransformSource",
    "TransformedTree",
    "Transforms",
    "WriteStore",
]
