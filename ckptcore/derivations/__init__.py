"""Derived arrays that the core computes itself. `ckptcore.loading.derived` reads and computes any derived array.

- `Stored`: an array of a checkpoint, from which all others are derived
- `Cut`, `Concatenation`, `Constant`: elements in other places (`ckptcore.derivations.arrays`)
- `WholeArray`: a base class of arrays that are computed only as a whole
- `Reshaped`: the same elements in C order with other axes (`ckptcore.derivations.reshaped`)
- `CastArray`, `Narrowed`: other dtypes (`ckptcore.derivations.dtypes`)

They compose: the inputs of a derived array are derived arrays. Each states which boxes of its inputs a box of it needs,
and no larger ones, so that a process reads only the parts of stored arrays that its shards need.
"""

from ckptcore.derivations.arrays import Constant, Stored, WholeArray, concatenate, constant, cut, pad, place, walk
from ckptcore.derivations.dtypes import Piece, cast, copy_rounded, is_complex, is_whole, may_become, narrow, pieces
from ckptcore.derivations.reshaped import reshape

__all__ = [
    "Constant",
    "Piece",
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
