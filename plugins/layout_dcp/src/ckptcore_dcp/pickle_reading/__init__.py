"""Pickles, zips and arrays in files, for layouts of other distributions. Public; nothing in a file is executed.

`read_pickle` reads a pickle as inert values, and `tree_of` makes a tree of them. `arrays_of` describes
a NumPy array of any dtype, and `read_zip` locates the members of a zip. `LocationColumns` collects
arrays for a `StorageIndex`, which reads them.
"""

from ckptcore_dcp.chunk_index import StorageIndex
from ckptcore_dcp.embedded_storages import EmbeddedStorages
from ckptcore_dcp.legacy_files import is_legacy
from ckptcore_dcp.numpy_arrays import Fields, arrays_of, numpy_dtype
from ckptcore_dcp.pickled_trees import Leaf, Unreadable, leaf_record, tree_of
from ckptcore_dcp.pickles import Call, DenseFileError, Global, OutOfLine, Places, Value, Window, read_pickle
from ckptcore_dcp.storages import LocationColumns, StoredBytes, pickled_storages
from ckptcore_dcp.stored_tensors import StoredTensor, c_strides
from ckptcore_dcp.streams import inflated_blocks
from ckptcore_dcp.zip_directories import DEFLATED, STORED, Fetch
from ckptcore_dcp.zips import ZipMember, read_member, read_zip

__all__ = [
    "DEFLATED",
    "STORED",
    "Call",
    "DenseFileError",
    "EmbeddedStorages",
    "Fetch",
    "Fields",
    "Global",
    "Leaf",
    "LocationColumns",
    "OutOfLine",
    "Places",
    "StorageIndex",
    "StoredBytes",
    "StoredTensor",
    "Unreadable",
    "Value",
    "Window",
    "ZipMember",
    "arrays_of",
    "c_strides",
    "inflated_blocks",
    "is_legacy",
    "leaf_record",
    "numpy_dtype",
    "pickled_storages",
    "read_member",
    "read_pickle",
    "read_zip",
    "tree_of",
]
