"""Transforms change a stored tree before a load matches it with the abstract tree.

``load(location, abstract, transforms=[Rename(...), Stack(...)])`` applies them in order. Transforms
read no arrays: for each requested part of a result, a load reads only the required parts of the
inputs. It is an error if a transform matches nothing or does not fit.

- `Rename`, `RenameTable`, `Drop`, `Refuse`, `Default`: change paths
- `Cast`, `Transpose`, `Reshape`, `SplitAxis`, `MergeAxes`, `Scale`, `Slice`, `Pad`, `Apply`: change
  single arrays
- `Dequantize`, `DequantizeMxfp4`, `DequantizeAsConfigured`: convert quantised weights and their
  scales to numbers
- `Stack`, `Unstack`, `Split`, `Fuse`: convert several arrays to one, or one to several
- `MergeLora`, `Average`: combine arrays of several checkpoints
- `IfPresent`: makes a transform optional
- `maps`: ready-made lists of transforms for model families
- `describe`: describes transforms in words; `inverse`: returns the reverse transforms
"""

from ckptcore.protocols import Transform, Transforms
from ckptcore_transforms import maps as maps
from ckptcore_transforms.array_transforms import (
    Apply,
    Cast,
    MergeAxes,
    Pad,
    Reshape,
    Scale,
    Slice,
    SplitAxis,
    Transpose,
)
from ckptcore_transforms.dequantize import Dequantize, DequantizeAsConfigured, DequantizeMxfp4
from ckptcore_transforms.joins import Fuse, Split, Stack, Unstack
from ckptcore_transforms.merges import Average, MergeLora
from ckptcore_transforms.paths import Default, Drop, Refuse, Rename, RenameTable
from ckptcore_transforms.patterns import Pattern
from ckptcore_transforms.transform import IfPresent, TreeTransform, inverse
from ckptcore_transforms.transformed import describe
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
