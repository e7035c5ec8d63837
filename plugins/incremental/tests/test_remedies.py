"""Remedies in errors for updates and partial saves. Each test follows the advice, and then loads what it saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from ckptcore_testing.cases import refused

import ckptcore

ONE, TWO = np.arange(3.0), np.arange(3.0, 6.0)


def expect(location: Path, **arrays: Any) -> None:
    """Load a checkpoint, and compare it with the given arrays."""
    loaded = ckptcore.load(location)
    assert loaded.keys() == arrays.keys()
    assert all(np.array_equal(loaded[name], array) for name, array in arrays.items())


def test_updates_of_foreign_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    safetensors.numpy.save_file({"w": ONE}, tmp_path / "foreign" / "model.safetensors")

    def update(base: str) -> None:
        ckptcore.save(tmp_path / "update", {"v": TWO}, strategy=ckptcore.Update(tmp_path / base))

    refused(lambda: update("foreign"), "copy it with ckptcore.copy(..., layout=...), and use the copy as the base")
    ckptcore.copy(tmp_path / "foreign", tmp_path / "copy", layout="safetensors")
    update("copy")
    expect(tmp_path / "update", w=ONE, v=TWO)


def test_updates_that_would_replace_their_base(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "1", {"w": ONE})
    ckptcore.save(tmp_path / "2", {"v": TWO}, strategy=ckptcore.Update(tmp_path / "1"))
    for base, text in (("1", "cannot refer to itself"), ("2", "would replace")):
        refused(
            lambda base=base: ckptcore.save(  # type: ignore[misc]  # of a default
                tmp_path / "1", {"n": TWO}, strategy=ckptcore.Update(tmp_path / base), overwrite=True
            ),
            text,
            ": save the update to another location. Nothing was written",
        )
        ckptcore.save(tmp_path / f"of {base}", {"n": TWO}, strategy=ckptcore.Update(tmp_path / base))
    expect(tmp_path / "of 1", w=ONE, n=TWO)
    expect(tmp_path / "of 2", w=ONE, v=TWO, n=TWO)


def test_sessions_of_one_layout(tmp_path: Path) -> None:
    ckptcore.partial(tmp_path / "c", layout="dcp").save({"w": ONE})
    refused(
        lambda: ckptcore.partial(tmp_path / "c", layout="safetensors").save({"v": TWO}),
        "pass the layout of the sessions, with the same options. Nothing was written",
    )
    ckptcore.partial(tmp_path / "c", layout="dcp").save({"v": TWO})
    ckptcore.partial(tmp_path / "c").finalize()
    expect(tmp_path / "c", w=ONE, v=TWO)


def test_arrays_that_sessions_did_not_complete(tmp_path: Path) -> None:
    def part(start: int, stop: int) -> dict[str, Any]:
        return {"w": ckptcore.ShardedArray.part(TWO[start:stop], (start,), (3,))}

    ckptcore.partial(tmp_path / "c").save(part(0, 2))
    refused(
        lambda: ckptcore.partial(tmp_path / "c").finalize(),
        "arrays are incomplete: w",
        "Save the missing elements in another session, then finalize again",
    )
    ckptcore.partial(tmp_path / "c").save(part(2, 3))
    ckptcore.partial(tmp_path / "c").finalize()
    expect(tmp_path / "c", w=TWO)
