"""Pickles as data: a machine that reads them as inert values, and an encoder.

No object of a pickle is imported or called. The result of a class or function becomes a `Call` that
records the function and its arguments; the caller decides what it means.

- `values`: the values of a pickle, errors about pickles, and limits of the cost of hashing dict keys
- `machine`: executes the opcodes of protocols 0 to 5
- `opcodes`: the table of opcodes
- `state`: the values that the opcodes have built so far
- `literals`: opcodes that contain a value, and a window that skips the long literals of a long file
- `known_calls`: results of a few known functions
- `encoder`: encodes values with protocols 2 and 4
"""

from ckptcore_dcp.pickles.encoder import write_pickle
from ckptcore_dcp.pickles.known_calls import builtin_value
from ckptcore_dcp.pickles.literals import DenseFileError, Window
from ckptcore_dcp.pickles.machine import read_pickle
from ckptcore_dcp.pickles.state import UNSET, ObjectReader
from ckptcore_dcp.pickles.values import Call, CompactObject, Global, OutOfLine, Persistent, Place, Places, Value, brief

__all__ = [
    "UNSET",
    "Call",
    "CompactObject",
    "DenseFileError",
    "Global",
    "ObjectReader",
    "OutOfLine",
    "Persistent",
    "Place",
    "Places",
    "Value",
    "Window",
    "brief",
    "builtin_value",
    "read_pickle",
    "write_pickle",
]
