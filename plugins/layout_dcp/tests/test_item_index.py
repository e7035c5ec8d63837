"""An index of torch.save items from a hostile state."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from ckptcore_dcp.chunk_index import ItemIndex
from ckptcore_testing.layout_stores import DirectoryReadStore

from ckptcore.model import LEAF, ArrayRecord, ArraySpec, Box, Node, ReadItem, TreeMetadata

TREE = TreeMetadata(Node("list", (0,), (LEAF,)), (ArrayRecord(ArraySpec((10, 10), "uint8")),))


def test_two_chunks_at_one_offset_are_both_filled(tmp_path: Path) -> None:
    stored = io.BytesIO()
    torch.save(torch.ones((5, 10), dtype=torch.uint8), stored)
    (tmp_path / "f").write_bytes(stored.getvalue())
    state = {
        "content": "items",
        "files": ["f"],
        "leaf": [0, 0],
        "file": [0, 0],
        "offset": [0, 0],
        "box": [0, 0, 5, 10, 5, 0, 10, 10],
        "nbytes": [len(stored.getvalue())] * 2,
        "transforms": {},
    }
    buffer = np.full((10, 10), 77, np.uint8)
    items = [ReadItem(0, Box((0, 0), (10, 10)))]
    assert list(DirectoryReadStore(tmp_path).read_boxes(ItemIndex(TREE, state), items, [buffer])) == [0]
    assert (buffer == 1).all()
