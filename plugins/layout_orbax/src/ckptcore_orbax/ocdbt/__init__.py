"""OCDBT, tensorstore's key-value database in files: where the value of each key lies, and databases to be written.

The format: https://google.github.io/tensorstore/kvstore/ocdbt/index.html, and tensorstore's own code where that page differs
(`manifest` and `node` say where). Nothing outside of this package knows it, and nothing here knows arrays.

    frame      what manifests and nodes have in common: magic, length, compression, checksum
    cursor     a position in the body of one; varints its numbers
    paths      the table of files that each carries
    manifest   the versions of a database
    node       a node of the B+tree
    database   reading
    encoding   writing
"""

from ckptcore_orbax.ocdbt.database import Database
from ckptcore_orbax.ocdbt.encoding import EncodedDatabase, encode_database
from ckptcore_orbax.ocdbt.node import Value

__all__ = ["Database", "EncodedDatabase", "Value", "encode_database"]
