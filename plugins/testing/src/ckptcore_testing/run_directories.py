"""Conformance tests for run directories, which a `Checkpointer` and a `CheckpointReader` take in place of a path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptcore import Checkpointer, CheckpointReader, Context, ShardedArray
from ckptcore.errors import CheckpointError, CheckpointExistsError, DirectoryInUseError, OnlyStepError
from ckptcore.training import RunDirectory
from ckptcore_testing.thread_coordinator import run_ranks

_ROWS = 6


def _state(step: int, rank: int = 0, size: int = 1) -> dict[str, Any]:
    """Return a state with an array that is sharded between ranks."""
    rows = _ROWS // size
    whole = np.arange(_ROWS * 4, dtype=np.float32).reshape(_ROWS, 4) + step
    mine = np.ascontiguousarray(whole[rows * rank : rows * (rank + 1)])
    cuts = [[rows * other for other in range(1, size)], []]
    return {"w": ShardedArray.part(mine, (rows * rank, 0), whole.shape, cuts=cuts), "step": step}


def _expect(loaded: Mapping[str, Any], step: int) -> None:
    assert loaded["step"] == step
    np.testing.assert_array_equal(loaded["w"], np.arange(_ROWS * 4, dtype=np.float32).reshape(_ROWS, 4) + step)


class RunDirectoryTests:
    """Tests of `ckptcore.training.RunDirectory`, for implementations to inherit.

    Implement `directory`. The directory must keep at least the newest two steps.
    """

    def directory(self, path: Path) -> RunDirectory:
        """Return the description of a run at a path. Equal paths are the same run, also in another process."""
        raise NotImplementedError

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        """The path of a new run."""
        return tmp_path / "run"

    def test_it_describes_a_run_without_input_and_output(self, path: Path) -> None:
        """Descriptions of the same run have the same location."""
        assert isinstance(self.directory(path), RunDirectory)
        assert self.directory(path).location == self.directory(path).location
        assert not path.exists()

    def test_steps_are_saved_listed_and_loaded(self, path: Path) -> None:
        """By the owner, by a reader, and by the next owner."""
        with Checkpointer(self.directory(path)) as run:
            assert not run.steps and run.latest is None
            for step in (3, 4):
                run.save(step, _state(step))
            run.wait()
            assert run.steps == (3, 4)
            _expect(run.load(), 4)
            reader = CheckpointReader(self.directory(path))
            assert reader.steps == (3, 4) and reader.latest == 4
            _expect(reader.load(3), 3)
        with Checkpointer(self.directory(path)) as run:
            assert run.steps == (3, 4)
            _expect(run.load(3), 3)
            run.save(5, _state(5))
            run.wait()
            assert run.latest == 5

    def test_a_step_is_replaced_only_on_request(self, path: Path) -> None:
        """A refused save changes nothing."""
        with Checkpointer(self.directory(path)) as run:
            run.save_blocking(1, _state(10))
            with pytest.raises(CheckpointExistsError):
                run.save_blocking(1, _state(20))
            assert run.load(1)["step"] == 10
            run.save_blocking(1, _state(30), overwrite="non-atomic")
            assert run.load(1)["step"] == 30
        assert CheckpointReader(self.directory(path)).load(1)["step"] == 30

    def test_a_save_that_fails_leaves_no_step(self, path: Path) -> None:
        """Later saves succeed."""
        with Checkpointer(self.directory(path)) as run:
            run.save_blocking(1, _state(1))
            with pytest.raises(CheckpointError):
                run.save_blocking(2, {"w": object()})
            assert list(run.steps) == [1]
            run.save_blocking(2, _state(2))
            assert list(run.steps) == [1, 2]

    def test_a_deleted_step_stays_deleted(self, path: Path) -> None:
        """The only step is not deleted."""
        with Checkpointer(self.directory(path)) as run:
            for step in (1, 2):
                run.save_blocking(step, _state(step))
            run.delete(1)
            assert run.steps == (2,)
            run.wait()
            with pytest.raises(OnlyStepError):
                run.delete(2)
        with Checkpointer(self.directory(path)) as run:
            assert run.steps == (2,)
            run.save_blocking(1, _state(7), force=True)
            assert run.load(1)["step"] == 7

    def test_a_second_owner_is_refused_and_the_first_one_goes_on(self, path: Path) -> None:
        """After the first one has closed the directory, the second one owns it."""
        with Checkpointer(self.directory(path)) as run:
            run.save_blocking(1, _state(1))
            with pytest.raises(DirectoryInUseError):
                Checkpointer(self.directory(path))
            run.save_blocking(2, _state(2))
            assert run.steps == (1, 2)
        with Checkpointer(self.directory(path)) as run:
            _expect(run.load(), 2)

    def test_metadata_are_stored_with_the_run(self, path: Path) -> None:
        """A later owner without metadata keeps them."""
        with Checkpointer(self.directory(path), metadata={"model": [1, None]}) as run:
            run.save_blocking(1, _state(1))
        with Checkpointer(self.directory(path)):
            pass
        assert CheckpointReader(self.directory(path)).root_metadata == {"model": [1, None]}

    def test_all_processes_of_a_job_have_the_same_steps(self, path: Path) -> None:
        """A job of another size loads them."""

        def save(rank: int, context: Context) -> Sequence[int]:
            with Checkpointer(self.directory(path), context=context) as run:
                for step in (1, 2):
                    run.save(step, _state(step, rank, 3))
                run.wait()
                return run.steps

        def load(rank: int, context: Context) -> int | None:
            with Checkpointer(self.directory(path), context=context) as run:
                loaded = run.load_into(_state(0, rank, 2))
                expected = _state(2, rank, 2)["w"].shards[0]
                np.testing.assert_array_equal(loaded["w"].shards[0].elements, expected.elements)
                return run.restored_step

        assert list(run_ranks(3, save)) == [(1, 2)] * 3
        assert list(run_ranks(2, load)) == [2, 2]
