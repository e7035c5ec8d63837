"""OCDBT, the key-value database of TensorStore: locates values, and encodes new databases.

The format: https://google.github.io/tensorstore/kvstore/ocdbt/index.html, and TensorStore's code
where it differs from that page (see `manifest` and `node`). This package imports neither `zarr` nor
`orbax`, and has no concept of arrays.

    frame      envelope of manifests and nodes: magic, length, compression, checksum
    cursor     reads the body of a frame; varints: its numbers
    paths      the table of files in each manifest and node
    manifest   the versions of a database
    node       a node of the B+tree
    database   reading
    encoding   writing
"""
