"""Derived arrays that the core makes itself, and reading of any derived array.

- `Stored`: an array of a checkpoint, of which everything else is made
- `Cut`, `Concatenation`, `Constant`: elements in other places (`ckptcore.derivations.views`)
- `Reshaped`: the same elements in C order with other axes (`ckptcore.derivations.reshaped`)
- `CastArray`, `Narrowed`: other dtypes (`ckptcore.derivations.casts`)
- `WholeArray`: a base class of arrays that are computed only as a whole
- `Batch`, `Fill`: what is read and computed to fill boxes (`ckptcore.derivations.batches`)

They compose: the inputs of a derived array are derived arrays. Each states the boxes of its inputs that a box of it is
made of, and no larger ones, so that a process reads only the parts of stored arrays that its shards need.
"""

from ckptcore.derivations.casts import (
    CastArray,
    Narrowed,
    Piece,
    cast,
    copy_rounded,
    is_complex,
    is_whole,
    narrow,
    pieces,
)
from ckptcore.derivations.derivation import OfNothing, Stored, WholeArray, place, walk
from ckptcore.derivations.dtype_values import may_become
from ckptcore.derivations.reshaped import Reshaped, reshape
from ckptcore.derivations.views import Concatenation, Constant, Cut, concatenate, constant, cut, pad

__all__ = [
    "CastArray",
    "Concatenation",
    "Constant",
    "Cut",
    "Narrowed",
    "OfNothing",
    "Piece",
    "Reshaped",
    "Stored",
    "WholeArray",
    "cast",
    "concatenate",
    "constant",
    "copy_rounded",
    "cut",
    "is_complex",
    "is_whole",
    "may_become",
    "narrow",
    "pad",
    "pieces",
    "place",
    "reshape",
    "walk",
]
