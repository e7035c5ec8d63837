"""The file ``.metadata`` of torch.distributed.checkpoint: its tensors, values and their locations.

It is a pickle of protocol 4 of ``torch.distributed.checkpoint.metadata.Metadata`` (torch 2.13.0,
metadata.py and filesystem.py)::

    state_dict_metadata  {name: TensorStorageMetadata(properties, size, chunks[ChunkStorageMetadata(offsets, sizes)])
                                or BytesStorageMetadata()}
    planner_data         {name: path}, or None
    storage_data         {MetadataIndex(fqn, offset, index):
                          _StorageInfo(relative_path, offset, length, transform_descriptors)}
    storage_meta         StorageMeta(checkpoint_id, save_id, load_id, modules), or None
    version              "1.0.0", or None

Classes are recognised by name, in every module that contained them in some version of torch. Data
that other software adds (Megatron-LM: ``mcore_data``) is ignored.

- `entries`: the contents as data, with the chunks of all tensors as columns, and the names of torch's classes
- `reading`: decodes a pickle that may be hostile
- `fast`: decodes the chunks and locations of a large pickle, many in one step
- `row_templates`: matches the bytes of one row with many places of a pickle at once
- `joining`: joins chunks and locations as columns
- `writing`: encodes entries as a pickle that torch reads, a whole column in one step
"""

from ckptcore_dcp.metadata.entries import (
    ChunkRows,
    DcpChunk,
    DcpChunkColumns,
    DcpMetadata,
    DcpPath,
    DcpTensor,
    DcpTensors,
    DcpValue,
    TensorHead,
    join_chunks,
    ranges_of,
)
from ckptcore_dcp.metadata.reading import read_metadata
from ckptcore_dcp.metadata.writing import write_metadata

__all__ = [
    "ChunkRows",
    "DcpChunk",
    "DcpChunkColumns",
    "DcpMetadata",
    "DcpPath",
    "DcpTensor",
    "DcpTensors",
    "DcpValue",
    "TensorHead",
    "join_chunks",
    "ranges_of",
    "read_metadata",
    "write_metadata",
]
