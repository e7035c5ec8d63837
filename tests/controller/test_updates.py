"""Updates with workers, which write the changed arrays and read the others from the bases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ckptcore
from ckptcore.context import IOOptions
from ckptcore.model import ArraySpec, Box
from tests.controller.arrays import COLUMNS, ROWS, SPEC, digests_of, make_rows, make_whole
from tests.controller.elements import counted
from tests.controller.remote_arrays import RemoteArray
from tests.controller.worker_processes import WorkerProcesses


@pytest.mark.parametrize("layout", ["safetensors", "zarr3"])
@pytest.mark.parametrize("bases", ["siblings", "anywhere"])
def test_workers_save_and_load_updates(
    bases: str, layout: str, workers: WorkerProcesses, context: ckptcore.Context, tmp_path: Path
) -> None:
    first, second = tmp_path / "run" / "1", tmp_path / ("run" if bases == "siblings" else "other") / "2"
    if bases == "anywhere":
        context = replace(context, io=replace(context.io, bases="anywhere"))
    ckptcore.save(first, {"kept": make_rows(workers), "given": np.ones(3), "n": 1}, layout=layout, context=context)
    update = {"given": make_whole(workers), "more": make_rows(workers), "n": 2}
    ckptcore.save(second, update, strategy=ckptcore.Update(first), layout="safetensors", context=context)
    whole = counted(SPEC, Box.whole(SPEC.shape))
    loaded = ckptcore.load(second, context=replace(ckptcore.Context(), io=IOOptions(bases=context.io.bases)))
    assert loaded["n"] == 2
    for name in ("kept", "given", "more"):
        assert np.array_equal(loaded[name], whole), name
    abstract = {
        name: RemoteArray(SPEC, boxes) for name, boxes in (("kept", COLUMNS), ("given", ROWS), ("more", COLUMNS))
    }
    updated = ckptcore.load(second, {**abstract, "n": 0}, context=context)
    for name, requested in abstract.items():
        assert workers.digests(updated[name]) == digests_of(requested.boxes), name
    narrow = RemoteArray(ArraySpec(SPEC.shape, "bfloat16"), COLUMNS)
    cast = ckptcore.load(
        second,
        {"kept": narrow, "given": ..., "more": ..., "n": ...},
        matching=ckptcore.Matching(cast="narrowing"),
        context=context,
    )
    assert np.array_equal(workers.elements(cast["kept"]), whole.astype(ml_dtypes.bfloat16))
