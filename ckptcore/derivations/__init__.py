"""Derived arrays of the core. `ckptcore.opening.derived` computes derived arrays of all distributions.

- `Stored`: an array of a checkpoint; the other derived arrays are computed from stored arrays
- `Cut`, `Concatenation`, `Constant`: parts of arrays, joined arrays, constants (`ckptcore.derivations.arrays`)
- `WholeArray`: base class of arrays that can only be computed as a whole
- `ChangedArray`: base class of arrays that other arrays change in place
- `Reshaped`: the same elements in C order with another shape (`ckptcore.derivations.reshaped`)
- `cast`, `narrow`, `truncate`: other dtypes (`ckptcore.derivations.dtypes`)

Derived arrays compose: their inputs are derived arrays too. For each of its boxes, a derived
array states which boxes of its inputs are needed. So a process reads only the parts of stored arrays that its shards
need.
"""

from ckptcore.derivations.arrays import (
    ChangedArray,
    Constant,
    Stored,
    WholeArray,
    concatenate,
    constant,
    copy_parts,
    cut,
    pad,
    walk,
)
from ckptcore.derivations.dtypes import (
    PieceIndex,
    accepts_kind_of,
    cast,
    copy_rounded,
    is_complex,
    is_int_or_bool,
    narrow,
    pieces,
    truncate,
)
from ckptcore.derivations.reshaped import reshape

__all__ = [
    "ChangedArray",
    "Constant",
    "PieceIndex",
    "Stored",
    "WholeArray",
    "accepts_kind_of",
    "cast",
    "concatenate",
    "constant",
    "copy_parts",
    "copy_rounded",
    "cut",
    "is_complex",
    "is_int_or_bool",
    "narrow",
    "pad",
    "pieces",
    "reshape",
    "truncate",
    "walk",
]
