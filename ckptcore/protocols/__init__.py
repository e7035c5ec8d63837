"""The protocols that plugins implement.

::

    values      handlers of leaves, containers and checkpointables; transforms of a tree while it is loaded
    layouts     layouts, and the stores that they write and read
    storage     storages
    job         strategies of saves and loads, commits and transactions; the processes of a job, their messages, and the
                workers of a single controller
"""

from ckptcore.protocols.derived_arrays import DerivedArray as DerivedArray
from ckptcore.protocols.derived_arrays import Part as Part
from ckptcore.protocols.job import Channels as Channels
from ckptcore.protocols.job import Collectives as Collectives
from ckptcore.protocols.job import Coordinator as Coordinator
from ckptcore.protocols.job import Executor as Executor
from ckptcore.protocols.job import GathersInGroups as GathersInGroups
from ckptcore.protocols.job import ReadBoxes as ReadBoxes
from ckptcore.protocols.job import ReadStrategy as ReadStrategy
from ckptcore.protocols.job import ReadThrough as ReadThrough
from ckptcore.protocols.job import Rejoinable as Rejoinable
from ckptcore.protocols.job import ReportsAwaited as ReportsAwaited
from ckptcore.protocols.job import SaveCommit as SaveCommit
from ckptcore.protocols.job import SaveStrategy as SaveStrategy
from ckptcore.protocols.job import StagedLoad as StagedLoad
from ckptcore.protocols.job import StepStrategy as StepStrategy
from ckptcore.protocols.job import Transaction as Transaction
from ckptcore.protocols.layouts import BaseReference as BaseReference
from ckptcore.protocols.layouts import ChainedArrays as ChainedArrays
from ckptcore.protocols.layouts import ChainLink as ChainLink
from ckptcore.protocols.layouts import CheckpointInfo as CheckpointInfo
from ckptcore.protocols.layouts import ChunkIndex as ChunkIndex
from ckptcore.protocols.layouts import InspectedComposite as InspectedComposite
from ckptcore.protocols.layouts import Inspection as Inspection
from ckptcore.protocols.layouts import Layout as Layout
from ckptcore.protocols.layouts import LayoutCapabilities as LayoutCapabilities
from ckptcore.protocols.layouts import LayoutFactory as LayoutFactory
from ckptcore.protocols.layouts import MemberKind as MemberKind
from ckptcore.protocols.layouts import NativeReader as NativeReader
from ckptcore.protocols.layouts import ReadStore as ReadStore
from ckptcore.protocols.layouts import Snapshot as Snapshot
from ckptcore.protocols.layouts import WriteStore as WriteStore
from ckptcore.protocols.storage import IF_ABSENT as IF_ABSENT
from ckptcore.protocols.storage import AtomicDirectories as AtomicDirectories
from ckptcore.protocols.storage import Buffer as Buffer
from ckptcore.protocols.storage import DirectoryFeatures as DirectoryFeatures
from ckptcore.protocols.storage import DirectoryLock as DirectoryLock
from ckptcore.protocols.storage import IfAbsent as IfAbsent
from ckptcore.protocols.storage import IfTag as IfTag
from ckptcore.protocols.storage import NameForm as NameForm
from ckptcore.protocols.storage import ObjectWriter as ObjectWriter
from ckptcore.protocols.storage import PlaceLimits as PlaceLimits
from ckptcore.protocols.storage import PutCondition as PutCondition
from ckptcore.protocols.storage import RangeReader as RangeReader
from ckptcore.protocols.storage import StampedReader as StampedReader
from ckptcore.protocols.storage import StorageAddress as StorageAddress
from ckptcore.protocols.storage import StorageBackend as StorageBackend
from ckptcore.protocols.storage import StorageCapabilities as StorageCapabilities
from ckptcore.protocols.storage import StorageOpener as StorageOpener
from ckptcore.protocols.storage import StorageOptions as StorageOptions
from ckptcore.protocols.values import AbstractLeaves as AbstractLeaves
from ckptcore.protocols.values import CheckpointableHandler as CheckpointableHandler
from ckptcore.protocols.values import ContainerHandler as ContainerHandler
from ckptcore.protocols.values import Continuation as Continuation
from ckptcore.protocols.values import DerivedTree as DerivedTree
from ckptcore.protocols.values import FilesHandler as FilesHandler
from ckptcore.protocols.values import Flattened as Flattened
from ckptcore.protocols.values import HostBytes as HostBytes
from ckptcore.protocols.values import HostMemory as HostMemory
from ckptcore.protocols.values import LeafHandler as LeafHandler
from ckptcore.protocols.values import Priority as Priority
from ckptcore.protocols.values import StatefulCheckpointable as StatefulCheckpointable
from ckptcore.protocols.values import Transform as Transform
from ckptcore.protocols.values import TransformedTree as TransformedTree
from ckptcore.protocols.values import Transforms as Transforms
from ckptcore.protocols.values import TransformSource as TransformSource
