"""Derivations: how an array is made of boxes of other arrays. Pure; no I/O.

- `Stored`: an array of a checkpoint, of which everything else is made
- `cut`, `concatenate`, `stack`, `permute`, `pad`: its elements in other places (`ckptcore.derivations.placed`)
- `reshape`: its elements in C order with other axes (`ckptcore.derivations.reshaped`)
- `cast`, `constant`, `weighted_sum`, `merge_low_rank`, `computed`: other elements (`ckptcore.derivations.made`)
- `block_scaled`, `mxfp4`: elements times the scales of their blocks (`ckptcore.derivations.scaled`)
- `reinterpret`, `unpack_fp4`: bytes as other elements (`ckptcore.derivations.packed`)

They compose: what one is made of are derivations. Each says of which boxes of those a box of it is made, and no larger ones, so that
a process which needs a part of the last array reads the parts of stored ones that it takes.
"""

from ckptcore.derivations.derivation import Derivation, Part, Stored
from ckptcore.derivations.made import (
    Cast,
    Computed,
    Constant,
    LowRankMerge,
    WeightedSum,
    cast,
    computed,
    constant,
    merge_low_rank,
    weighted_sum,
)
from ckptcore.derivations.packed import Reinterpreted, UnpackedFp4, reinterpret, unpack_fp4
from ckptcore.derivations.placed import Concatenation, Cut, Permuted, concatenate, cut, pad, permute, stack
from ckptcore.derivations.reshaped import Reshaped, reshape
from ckptcore.derivations.scaled import BlockScaled, block_of, block_scaled, mxfp4

__all__ = [
    "BlockScaled",
    "Cast",
    "Computed",
    "Concatenation",
    "Constant",
    "Cut",
    "Derivation",
    "LowRankMerge",
    "Part",
    "Permuted",
    "Reinterpreted",
    "Reshaped",
    "Stored",
    "UnpackedFp4",
    "WeightedSum",
    "block_of",
    "block_scaled",
    "cast",
    "computed",
    "concatenate",
    "constant",
    "cut",
    "merge_low_rank",
    "mxfp4",
    "pad",
    "permute",
    "reinterpret",
    "reshape",
    "stack",
    "unpack_fp4",
    "weighted_sum",
]
