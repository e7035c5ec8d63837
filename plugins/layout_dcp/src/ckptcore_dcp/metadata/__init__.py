"""The file ``.metadata`` of torch.distributed.checkpoint: which tensors and values there are, and where their parts lie.

It is a pickle of protocol 4 of ``torch.distributed.checkpoint.metadata.Metadata`` (torch 2.13.0, metadata.py and
filesystem.py)::

    state_dict_metadata  {name: TensorStorageMetadata(properties, size, chunks[ChunkStorageMetadata(offsets, sizes)])
                                or BytesStorageMetadata()}
    planner_data         {name: path}, or None
    storage_data         {MetadataIndex(fqn, offset, index):
                          _StorageInfo(relative_path, offset, length, transform_descriptors)}
    storage_meta         StorageMeta(checkpoint_id, save_id, load_id, modules), or None
    version              "1.0.0", or None

Classes are known by their names, and those that moved between versions of torch by any of them. What other software
adds (Megatron-LM: ``mcore_data``) is passed over.

- `entries`: what it says, as data
- `chunk_rows`: the chunks of all tensors as columns
- `opcode_rows`: columns to opcodes, all rows at once
- `classes`: what the classes of torch are called
- `reading`: out of a pickle that may be hostile
- `pickled`: from the values of the pickle to entries
- `fast`: the chunks and places of a large pickle, each in one step
- `writing`: as torch would
"""

from ckptcore_dcp.metadata.chunk_rows import ChunkRows, ChunkTableColumns, joined_chunks
from ckptcore_dcp.metadata.entries import DcpChunk, DcpMetadata, DcpPath, DcpTensor, DcpValue
from ckptcore_dcp.metadata.reading import read_metadata
from ckptcore_dcp.metadata.writing import write_metadata

__all__ = [
    "ChunkRows",
    "ChunkTableColumns",
    "DcpChunk",
    "DcpMetadata",
    "DcpPath",
    "DcpTensor",
    "DcpValue",
    "joined_chunks",
    "read_metadata",
    "write_metadata",
]
