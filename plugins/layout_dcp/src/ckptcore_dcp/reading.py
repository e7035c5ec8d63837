"""Files of ``torch.save``, pickles, zips and arrays as data, for layouts of other distributions. Public.

Nothing in a file is executed. `read_torch_file` returns the tree of a file of ``torch.save`` without its elements, and
the byte ranges of its storages. `read_pickle` reads any pickle as inert values, and `tree_of` builds a tree of them.
`arrays_of` describes a NumPy array of any dtype, and `read_zip` locates the members of a zip. `LocationColumns`
collects whole arrays for a `StorageIndex`, which reads them. A layout that assembles an array from several tensors
takes the byte ranges from `StoredTensor` and `StoredBytes`. `ReadOnlyLayout` rejects saves, and `RANK_FILE` matches
the name of a file of one process.
"""

from ckptcore_dcp.chunk_index import StorageIndex, add_locations
from ckptcore_dcp.directories import RANK_FILE, is_torch_file
from ckptcore_dcp.embedded_storages import EmbeddedStorages
from ckptcore_dcp.legacy_files import is_legacy
from ckptcore_dcp.numpy_arrays import Fields, arrays_of, numpy_dtype
from ckptcore_dcp.pickled_trees import Column, Leaf, Unreadable, leaf_record, tree_of
from ckptcore_dcp.pickles import Call, DenseFileError, Global, OutOfLine, Places, Value, Window, read_pickle
from ckptcore_dcp.storages import LocationColumns, StoredBytes, pickled_storages
from ckptcore_dcp.stored_tensors import StoredTensor, c_strides, check_bounds
from ckptcore_dcp.streams import inflated_blocks
from ckptcore_dcp.tensor_parts import TensorPart
from ckptcore_dcp.torch_files import ReadOnlyLayout, TorchFile, read_torch_file
from ckptcore_dcp.zip_directories import DEFLATED, STORED, Fetch
from ckptcore_dcp.zips import ZipMember, read_member, read_zip

__all__ = [
    "DEFLATED",
    "RANK_FILE",
    "STORED",
    "Call",
    "Column",
    "DenseFileError",
    "EmbeddedStorages",
    "Fetch",
    "Fields",
    "Global",
    "Leaf",
    "LocationColumns",
    "OutOfLine",
    "Places",
    "ReadOnlyLayout",
    "StorageIndex",
    "StoredBytes",
    "StoredTensor",
    "TensorPart",
    "TorchFile",
    "Unreadable",
    "Value",
    "Window",
    "ZipMember",
    "add_locations",
    "arrays_of",
    "c_strides",
    "check_bounds",
    "inflated_blocks",
    "is_legacy",
    "is_torch_file",
    "leaf_record",
    "numpy_dtype",
    "pickled_storages",
    "read_member",
    "read_pickle",
    "read_torch_file",
    "read_zip",
    "tree_of",
]
