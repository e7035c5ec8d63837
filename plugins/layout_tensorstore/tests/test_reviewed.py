"""What a review of the layouts found: each test failed once."""

from __future__ import annotations

from pathlib import Path

import ckptcore


def test_saves_without_arrays_share_no_names(tmp_path: Path) -> None:
    """Where directories cannot be renamed, what a dead save left must not stand where the next one writes."""
    nodes: set[str] = set()
    for number in range(3):
        place = tmp_path / str(number)
        ckptcore.save(place, {"step": 5}, layout="ocdbt")
        nodes.update([path.name for path in (place / "state" / "d").iterdir()])
    assert len(nodes) == 3
