"""Files of ``torch.save`` as data, for layouts of other distributions. Public; nothing in a file is executed.

`read_torch_file` returns the tree of a file without its elements, and where its storages are.
`LocationColumns` collects whole tensors for a `StorageIndex`, which reads them. A layout that puts
an array together from several tensors takes the byte ranges from `StoredTensor` and `StoredBytes`.
`ReadOnlyLayout` refuses saves, and `RANK_FILE` matches the name of a file of one process.
"""

from ckptcore_dcp.chunk_index import StorageIndex, add_locations
from ckptcore_dcp.directories import RANK_FILE, is_torch_file
from ckptcore_dcp.pickled_trees import Column, Leaf, Unreadable, leaf_record
from ckptcore_dcp.storages import LocationColumns, StoredBytes
from ckptcore_dcp.stored_tensors import StoredTensor, check_bounds
from ckptcore_dcp.tensor_parts import TensorPart
from ckptcore_dcp.torch_files import ReadOnlyLayout, TorchFile, read_torch_file
from ckptcore_dcp.zip_directories import STORED

__all__ = [
    "RANK_FILE",
    "STORED",
    "Column",
    "Leaf",
    "LocationColumns",
    "ReadOnlyLayout",
    "StorageIndex",
    "StoredBytes",
    "StoredTensor",
    "TensorPart",
    "TorchFile",
    "Unreadable",
    "add_locations",
    "check_bounds",
    "is_torch_file",
    "leaf_record",
    "read_torch_file",
]
