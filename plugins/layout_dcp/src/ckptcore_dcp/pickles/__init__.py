"""Pickles as data: a machine that builds inert values from one, and an encoder that writes one.

No object of a pickle is ever imported or called. What a class or a function would have made stands as a `Call` that
says what was asked for, and whoever reads it decides what that means.

- `values`: what a pickle can hold, and how to look at it without a recursion that the file chooses
- `machine`: opcodes of the protocols 0 to 5 to a value
- `literals`: the opcodes that hold a value in their own bytes
- `keys`: which values may be keys of a dict, and what it may cost to hash them
- `builtin_calls`: what the calls of a few builtins make
- `refusals`: errors about a pickle that say where in it
- `encoder`: a value to the opcodes of the protocols 2 and 4
- `plain_opcodes`: the opcodes of None, booleans and numbers
- `work`: what the encoder has yet to write
"""

from ckptcore_dcp.pickles.builtin_calls import builtin_value
from ckptcore_dcp.pickles.encoder import write_pickle
from ckptcore_dcp.pickles.machine import UNSET, ObjectReader, read_pickle
from ckptcore_dcp.pickles.values import Call, Compact, Global, Persistent, Value, brief, check_walk

__all__ = [
    "UNSET",
    "Call",
    "Compact",
    "Global",
    "ObjectReader",
    "Persistent",
    "Value",
    "brief",
    "builtin_value",
    "check_walk",
    "read_pickle",
    "write_pickle",
]
