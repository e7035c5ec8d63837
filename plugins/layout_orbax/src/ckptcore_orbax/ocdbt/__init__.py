"""OCDBT, the key-value database of TensorStore: finds the location of each value, and encodes new databases.

The format: https://google.github.io/tensorstore/kvstore/ocdbt/index.html, and TensorStore's code where it differs from
that page (`manifest` and `node` say where). This package imports neither `zarr` nor `orbax`, and knows no arrays.

    frame      what manifests and nodes have in common: magic, length, compression, checksum
    cursor     a position in the body of one; varints its numbers
    paths      the table of files in each manifest and node
    manifest   the versions of a database
    node       a node of the B+tree
    database   reading
    encoding   writing
"""
