"""A Checkpointer that writes weights for other programs at some of its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptcore
from ckptcore import Checkpointer, CheckpointReader, StepExport, StepExports
from ckptcore.errors import CheckpointExistsError, UnknownPluginError
from ckptcore.policies import FixedInterval, LatestN


def _state(step: int) -> dict[str, Any]:
    return {"model": {"w": np.full(3, float(step))}, "optimizer": {"m": np.ones(5)}}


@pytest.mark.parametrize("blocking", [False, True])
def test_every_nth_step_is_exported_and_kept(blocking: bool, tmp_path: Path) -> None:
    exports = [StepExport(directory=tmp_path / "weights", subtree="model", every=4)]
    with Checkpointer(
        tmp_path / "run", save_policy=FixedInterval(2), preservation_policy=LatestN(1), strategy=StepExports(exports)
    ) as checkpointer:
        for step in range(1, 11):
            save = checkpointer.save_blocking if blocking else checkpointer.save
            save(step, _state(step), metrics={"loss": step}, metadata={"by": "test"})
    assert CheckpointReader(tmp_path / "run").steps == (10,)
    weights = CheckpointReader(tmp_path / "weights")
    assert weights.steps == (4, 8)
    assert weights.load(8)["w"].tolist() == [8, 8, 8] and weights.metadata(8).custom == {"by": "test"}
    exported = [path for path in (tmp_path / "weights").iterdir() if not path.name.startswith(".")]
    assert len(exported) == 2 and all(ckptcore.verify(path).ok for path in exported)


def test_several_objects_export_one_of_them(tmp_path: Path) -> None:
    exports = [
        StepExport(directory=tmp_path / "weights", subtree="model"),
        StepExport(directory=tmp_path / "w", subtree="model/w", every=2),
    ]
    with Checkpointer(tmp_path / "run", strategy=StepExports(exports)) as checkpointer:
        for step in (1, 2):
            checkpointer.save_checkpointables(step, {**_state(step), "rng": np.random.default_rng(0)})
    assert CheckpointReader(tmp_path / "weights").steps == (1, 2) and CheckpointReader(tmp_path / "w").steps == (2,)
    assert CheckpointReader(tmp_path / "w").load().tolist() == [2, 2, 2]


def test_a_failed_export_is_reported_and_the_step_exists(tmp_path: Path) -> None:
    class Failing(ckptcore.SafetensorsLayout):
        def write(self, snapshot: Any, store: Any) -> Any:
            raise OSError("the disk is on fire")

    with Checkpointer(
        tmp_path / "run",
        strategy=StepExports([StepExport(directory=tmp_path / "weights", layout=Failing(), subtree=(), every=2)]),
    ) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, _state(step))
            if step == 2:
                with pytest.raises(OSError, match="on fire") as caught:
                    checkpointer.wait()
                assert "is committed; its export" in "".join(caught.value.__notes__)
        checkpointer.wait()
        assert checkpointer.steps == (1, 2, 3)
    with Checkpointer(tmp_path / "run") as again:
        assert again.load(2)["model"]["w"].tolist() == [2, 2, 2]


def test_a_step_that_is_replaced_replaces_its_export(tmp_path: Path) -> None:
    exports = [StepExport(directory=tmp_path / "weights", subtree="model")]
    with Checkpointer(tmp_path / "run", strategy=StepExports(exports)) as checkpointer:
        checkpointer.save(1, _state(1)).result()  # type: ignore[union-attr]  # every step is saved
        checkpointer.save(1, _state(5), overwrite=True).result()  # type: ignore[union-attr]  # every step is saved
    assert CheckpointReader(tmp_path / "weights").load(1)["w"].tolist() == [5, 5, 5]
    with Checkpointer(tmp_path / "other", strategy=StepExports(exports)) as other:
        with pytest.raises(CheckpointExistsError, match="weights"):
            other.save(1, _state(9))
        assert other.steps == ()
    assert CheckpointReader(tmp_path / "weights").load(1)["w"].tolist() == [5, 5, 5]


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        StepExport(directory=tmp_path, every=0)
    with pytest.raises(ValueError, match="the directory of the steps"):
        Checkpointer(tmp_path / "run", strategy=StepExports([StepExport(directory=tmp_path / "x" / ".." / "run")]))
    twice = [StepExport(directory=tmp_path / "w", every=2), StepExport(directory=f"{tmp_path}/w/", every=3)]
    with pytest.raises(ValueError, match=r"exports\[1\] writes to .*, the directory of exports\[0\]"):
        Checkpointer(tmp_path / "run", strategy=StepExports(twice))
    with pytest.raises(UnknownPluginError, match="'safetensor'"):
        Checkpointer(
            tmp_path / "run",
            strategy=StepExports([StepExport(directory=tmp_path / "w", layout="safetensor", every=1000)]),
        )
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TypeError, match=r"exports\[0\]"):
        Checkpointer(tmp_path / "run", strategy=StepExports(["weights"]))  # type: ignore[list-item]  # wrong on purpose
