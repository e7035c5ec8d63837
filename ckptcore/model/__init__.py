"""Frozen data that stages pass to each other. No I/O, no plugins.

Most types are named tuples, because a plan may have hundreds of thousands of boxes and items, and because every process
defines these types at its first save. A frozen dataclass takes 1.5 times as long to create, and five times as long to
hash, to compare and to define.
"""

from ckptcore.model.arrays import WHOLE_SAMPLE_BYTES as WHOLE_SAMPLE_BYTES
from ckptcore.model.arrays import AbstractArray as AbstractArray
from ckptcore.model.arrays import ArraySpec as ArraySpec
from ckptcore.model.arrays import Box as Box
from ckptcore.model.arrays import HostArray as HostArray
from ckptcore.model.arrays import Shard as Shard
from ckptcore.model.arrays import StridedMemory as StridedMemory
from ckptcore.model.arrays import dtype_from_name as dtype_from_name
from ckptcore.model.arrays import name_of_dtype as name_of_dtype
from ckptcore.model.arrays import sample_steps as sample_steps
from ckptcore.model.arrays import sampled as sampled
from ckptcore.model.columns import column_array as column_array
from ckptcore.model.columns import column_record as column_record
from ckptcore.model.columns import column_summary as column_summary
from ckptcore.model.columns import column_value as column_value
from ckptcore.model.columns import is_column as is_column
from ckptcore.model.metadata import BLOCK_BYTES as BLOCK_BYTES
from ckptcore.model.metadata import PARTS as PARTS
from ckptcore.model.metadata import PLAIN_ARRAY as PLAIN_ARRAY
from ckptcore.model.metadata import UNREADABLE as UNREADABLE
from ckptcore.model.metadata import ArrayRecord as ArrayRecord
from ckptcore.model.metadata import LeafRecord as LeafRecord
from ckptcore.model.metadata import ObjectRecord as ObjectRecord
from ckptcore.model.metadata import TreeMetadata as TreeMetadata
from ckptcore.model.metadata import ValueRecord as ValueRecord
from ckptcore.model.metadata import check_directory_key as check_directory_key
from ckptcore.model.metadata import check_key as check_key
from ckptcore.model.metadata import unreadable_error as unreadable_error
from ckptcore.model.metadata import unreadable_leaf as unreadable_leaf
from ckptcore.model.transfer import ArraySegment as ArraySegment
from ckptcore.model.transfer import BytesSegment as BytesSegment
from ckptcore.model.transfer import Checksum as Checksum
from ckptcore.model.transfer import ChecksumSegment as ChecksumSegment
from ckptcore.model.transfer import Chunk as Chunk
from ckptcore.model.transfer import ChunkLocations as ChunkLocations
from ckptcore.model.transfer import ChunkRead as ChunkRead
from ckptcore.model.transfer import IntegerColumn as IntegerColumn
from ckptcore.model.transfer import ItemColumns as ItemColumns
from ckptcore.model.transfer import Pending as Pending
from ckptcore.model.transfer import ReadItem as ReadItem
from ckptcore.model.transfer import ReadPlan as ReadPlan
from ckptcore.model.transfer import Ready as Ready
from ckptcore.model.transfer import Receipt as Receipt
from ckptcore.model.transfer import Segment as Segment
from ckptcore.model.transfer import WriteItem as WriteItem
from ckptcore.model.transfer import WritePlan as WritePlan
from ckptcore.model.tree import JSON as JSON
from ckptcore.model.tree import LEAF as LEAF
from ckptcore.model.tree import Attribute as Attribute
from ckptcore.model.tree import Key as Key
from ckptcore.model.tree import Node as Node
from ckptcore.model.tree import PlainKey as PlainKey
from ckptcore.model.tree import Skeleton as Skeleton
from ckptcore.model.tree import StoredObject as StoredObject
from ckptcore.model.tree import TreePath as TreePath
from ckptcore.model.tree import are_indices as are_indices
from ckptcore.model.tree import float_from_json as float_from_json
from ckptcore.model.tree import float_to_json as float_to_json
from ckptcore.model.tree import format_path as format_path
