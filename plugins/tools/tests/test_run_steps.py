"""States of the steps of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from ckptcore_tools.near_notes import write_near_note
from ckptcore_tools.run_steps import StepStatus, find_near, find_steps, read_steps
from safetensors.numpy import save_file

import ckptcore
from ckptcore.commit.location import open_directory
from ckptcore.commit.root import Root
from ckptcore.commit.root_json import decode_root, encode_root
from ckptcore.context import Context
from ckptcore.runtime import runtime_of
from ckptcore.step_names import StepNames


def read(directory: Path) -> dict[int, StepStatus]:
    steps = find_steps(str(directory), StepNames(), Context())
    return {status.step: status for status in read_steps(steps, steps.candidates(), Context())}


def with_timeline(directory: Path, change: Callable[[object], object]) -> None:
    """Change the timeline in a root."""
    path = directory / "checkpoint.json"
    root = decode_root(path.read_bytes(), lambda key, size: b"")
    assert isinstance(root, Root)
    object.__setattr__(root, "timeline", change(root.timeline))
    path.write_bytes(encode_root(root)[0])


def test_a_step_has_the_durations_of_its_save(tmp_path: Path) -> None:
    with ckptcore.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": np.ones(3)})
        checkpointer.save_checkpointables(2, {"model": {"w": np.ones(3)}})
    statuses = read(tmp_path)
    for step in (1, 2):
        events = ckptcore.metadata(tmp_path / str(step)).timeline
        first, last = min(event.began for event in events), max(event.ended for event in events)
        assert statuses[step].seconds == last - first
        assert statuses[step].save_id == ckptcore.metadata(tmp_path / str(step)).save_id


def test_the_caller_was_blocked_until_its_call_returned(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "1", {"w": np.ones(3)})
    events = {"phase": ["describe", "blocking", "commit"], "offset": [0, 0, 5_000_000]}
    events |= {"duration": [10, 2_000_000, 1_000_000], "rank": [0] * 3, "nbytes": [None] * 3, "error": [None] * 3}
    with_timeline(tmp_path / "1", lambda timeline: {"operation": "save", "began": 1_700_000_000_000_000, **events})
    assert (read(tmp_path)[1].seconds, read(tmp_path)[1].blocked_seconds) == (6.0, 2.0)


def test_a_call_that_returns_after_the_commit_blocks_until_then(tmp_path: Path) -> None:
    with ckptcore.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_blocking(1, {"w": np.ones(3)})
    status = read(tmp_path)[1]
    assert status.seconds is not None
    assert status.blocked_seconds == status.seconds


def test_durations_that_are_not_stored_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    save_file({"w": np.ones(2)}, tmp_path / "checkpoint-1" / "model.safetensors")
    for step, timeline in ((2, None), (3, {"operation": "save"}), (4, [1])):
        ckptcore.save(tmp_path / str(step), {"w": np.ones(3)})
        with_timeline(tmp_path / str(step), lambda _, timeline=timeline: timeline)
    statuses = read(tmp_path)
    assert [statuses[step].state for step in (1, 2, 3, 4)] == ["foreign", "committed", "committed", "committed"]
    assert {(status.seconds, status.blocked_seconds) for status in statuses.values()} == {(None, None)}
    assert statuses[1].save_id is None


def test_the_near_directory_is_shown_and_never_opened(tmp_path: Path) -> None:
    def near() -> str | None:
        return find_near(find_steps(str(tmp_path), StepNames(), Context()))

    ckptcore.save(tmp_path / "1", {"w": np.ones(2)})
    assert near() is None
    write_near_note(
        open_directory(tmp_path, runtime_of(Context()).storages, to_write=True), "s3://me:secret@bucket/run"
    )
    assert near() is not None and "secret" not in str(near())
    for damaged in (b"", b"[1]", b'{"near": 5}', b"[" * 100_000, b"\xff"):
        (tmp_path / ".ckptcore" / "near.json").write_bytes(damaged)
        assert near() is None
