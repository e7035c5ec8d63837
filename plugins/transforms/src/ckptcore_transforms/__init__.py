"""Transforms: what a load changes of a stored tree, before it is matched with what is asked for.

``load(location, abstract, transforms=[Rename(...), Stack(...)])`` applies them in order. They read nothing: what makes an array reads
as little as the part of it takes that is asked for. What matches nothing, or does not fit, is an error.

- `Rename`, `RenameTable`, `Drop`, `Refuse`, `Default`: paths
- `Cast`, `Transpose`, `Reshape`, `SplitAxis`, `MergeAxes`, `Scale`, `Slice`, `Pad`, `Apply`: single arrays
- `Dequantize`, `DequantizeMxfp4`, `DequantizeAsConfigured`: quantised weights and their scales to numbers
- `Stack`, `Unstack`, `Split`, `Fuse`: several arrays to one, one to several
- `MergeLora`, `Average`: arrays of several checkpoints
- `IfPresent`: a transform that may have nothing to do
- `maps`: ready-made lists of transforms for families of models
- `describe`: what they do, in words; `inverse`: those that take the result back
"""

from ckptcore.loading.transformed import describe
from ckptcore.protocols import Transform, Transforms
from ckptcore_transforms import maps as maps
from ckptcore_transforms.arrays import Apply, Cast, MergeAxes, Pad, Reshape, Scale, Slice, SplitAxis, Transpose
from ckptcore_transforms.dequantize import Dequantize, DequantizeAsConfigured, DequantizeMxfp4
from ckptcore_transforms.merges import Average, MergeLora
from ckptcore_transforms.paths import Default, Drop, Refuse, Rename, RenameTable
from ckptcore_transforms.patterns import Pattern
from ckptcore_transforms.several import Fuse, Split, Stack, Unstack
from ckptcore_transforms.transform import IfPresent, TreeTransform, inverse
from ckptcore_transforms.tree_rewriter import TreeRewriter

__all__ = [
    "Apply",
    "Average",
    "Cast",
    "Default",
    "Dequantize",
    "DequantizeAsConfigured",
    "DequantizeMxfp4",
    "Drop",
    "Fuse",
    "IfPresent",
    "MergeAxes",
    "MergeLora",
    "Pad",
    "Pattern",
    "Refuse",
    "Rename",
    "RenameTable",
    "Reshape",
    "Scale",
    "Slice",
    "Split",
    "SplitAxis",
    "Stack",
    "Transform",
    "Transforms",
    "Transpose",
    "TreeRewriter",
    "TreeTransform",
    "Unstack",
    "describe",
    "inverse",
]
