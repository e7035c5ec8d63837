"""Planning of reads and writes: the boxes of each process, their coverage, and names of leaves. Pure functions."""

from ckptcore.model.tree import leaf_names
from ckptcore.planning.chunk_table import ChunkColumns, ChunkTable, natural_column
from ckptcore.planning.partition import boxes_of_range, check_coverage, cuts_of, plan_read, plan_write, uncovered

__all__ = [
    "ChunkColumns",
    "ChunkTable",
    "boxes_of_range",
    "check_coverage",
    "cuts_of",
    "leaf_names",
    "natural_column",
    "plan_read",
    "plan_write",
    "uncovered",
]
