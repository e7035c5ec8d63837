"""Derivations: how an array is made of boxes of other arrays. Pure; no I/O.

- `Stored`: an array of a checkpoint, of which everything else is made
- `cut`, `concatenate`, `stack`, `permute`, `pad`: its elements in other places (`ckptcore.derivations.placed`)
- `reshape`: its elements in C order with other axes (`ckptcore.derivations.reshaped`)
- `cast`, `constant`, `weighted_sum`, `merge_low_rank`, `computed`: other elements (`ckptcore.derivations.made`)

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
from ckptcore.derivations.placed import Concatenation, Cut, Permuted, concatenate, cut, pad, permute, stack
from ckptcore.derivations.reshaped import Reshaped, reshape

__all__ = [
    "Cast",
    "Computed",
    "Concatenation",
    "Constant",
    "Cut",
    "Derivation",
    "LowRankMerge",
    "Part",
    "Permuted",
    "Reshaped",
    "Stored",
    "WeightedSum",
    "cast",
    "computed",
    "concatenate",
    "constant",
    "cut",
    "merge_low_rank",
    "pad",
    "permute",
    "reshape",
    "stack",
    "weighted_sum",
]
