"""Arrays over the devices of some processes of a job, which the other processes know of, or do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import ckptcore
from tests.jobs.processes import run_job


def test_jax(tmp_path: Path) -> None:
    run_job("tests.jobs.jax_program", "submeshes", tmp_path, size=2, devices=2)
    rows = np.arange(12 * 8, dtype=np.float32).reshape(12, 8)
    for layout in ("safetensors", "zarr3", "ocdbt", "dcp"):
        found = ckptcore.load(tmp_path / layout)
        for owner in range(2):
            assert np.array_equal(found[f"of {owner}"], rows + owner)
            assert found[f"one of {owner}"].tolist() == [owner, 1 + owner, 2 + owner]
        assert found["tied"] is found["to it"] and np.array_equal(found["tied"], rows * 2)
        assert ckptcore.verify(tmp_path / layout).ok
        tree = ckptcore.metadata(tmp_path / layout).tree
        held_by = {str(tree.paths[leaf][0]): ranks for leaf, ranks in tree.held_by.items()}
        assert held_by == {
            "tied": (1,),
            "to it": (1,),
            **{f"{name} {owner}": (owner,) for name in ("of", "one of", "keys of") for owner in range(2)},
        }
