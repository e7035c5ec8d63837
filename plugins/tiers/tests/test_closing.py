"""A run whose far tier does not answer can be closed. The next run has all steps."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckptcore_tiers import NearTier, TieredDirectory, near_tier

from ckptcore import Checkpointer, CheckpointReader
from ckptcore.errors import StorageError, UploadError
from plugins.tiers.tests.far_stores import Silence
from tests.checkpointer.runs import Watch, assert_is_step, save_steps, through, watched


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Watch, Silence]]:
    """A fault plan, and a far tier that does not answer until the end of the test."""
    monkeypatch.setattr(near_tier, "_STOP_SECONDS", 0.1)
    watch = Watch()
    silent = Silence(watch)
    yield watch, silent
    _answer(silent)


def _answer(silent: Silence) -> None:
    """Answer all requests, and join the threads of the closed run, which may still release a directory."""
    silent.end()
    for thread in threading.enumerate():
        if thread.name in ("ckptcore-upload", "ckptcore-close", "ckptcore-clean"):
            thread.join()


def test_close_returns_if_no_upload_is_answered(near: str, far: str, silence: tuple[Watch, Silence]) -> None:
    watch, silent = silence
    run = Checkpointer(TieredDirectory(NearTier(near, close_seconds=0.1), through(far)), context=watched(watch))
    silent.begin()
    save_steps(run, [1, 2])
    assert silent.met.wait(60)
    with pytest.raises(UploadError) as raised:
        run.close()
    assert raised.value.steps == (1, 2)
    run.close()
    _answer(silent)
    with Checkpointer(tiers := TieredDirectory(NearTier(near), far), if_in_use="take over") as run:
        assert run.latest == 2
        tiers.wait_for_uploads(60)
        assert_is_step(run.load(), 2)


def test_close_returns_if_the_release_of_the_far_tier_is_not_answered(
    near: str, far: str, silence: tuple[Watch, Silence], caplog: pytest.LogCaptureFixture
) -> None:
    watch, silent = silence
    tiers = TieredDirectory(NearTier(near, close_seconds=0.1), through(far))
    run = Checkpointer(tiers, context=watched(watch))
    save_steps(run, [1])
    tiers.wait_for_uploads(60)
    silent.begin()
    run.close()
    if far.startswith("memory"):
        assert "is not released" in caplog.text


def test_a_directory_that_answers_is_released_after_the_deadline(
    near: str, far: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another directory, which does not answer, may already have used up the time."""
    monkeypatch.setattr(near_tier, "_STOP_SECONDS", 0.0)
    monkeypatch.setattr(near_tier, "_RELEASE_SECONDS", 60.0)
    with Checkpointer(tiers := TieredDirectory(NearTier(near, close_seconds=0), far)) as run:
        save_steps(run, [1])
        tiers.wait_for_uploads(60)
    assert "is not released" not in caplog.text


def test_close_returns_if_a_deletion_is_not_answered(near: str, far: str, silence: tuple[Watch, Silence]) -> None:
    watch, silent = silence
    tiers = TieredDirectory(NearTier(near, close_seconds=0.1), through(far))
    run = Checkpointer(tiers, context=watched(watch))
    save_steps(run, [1, 2])
    tiers.wait_for_uploads(60)
    silent.begin("delete", "delete_directory")
    run.delete(1)
    assert silent.met.wait(60)
    # The deletion in the near tier may be slow, too.
    with pytest.raises(StorageError, match=r"[12] deletion\(s\) of steps did not end"):
        run.close()


_ENDS_SILENTLY = """
import sys
from ckptcore import Checkpointer
from ckptcore_tiers import NearTier, TieredDirectory
from tests.checkpointer.runs import Watch, save_steps, through, watched
from plugins.tiers.tests.far_stores import Silence
watch = Watch()
silent = Silence(watch)
near, far, ends = sys.argv[1:]
seconds = None if ends == "failed" else 0.1
run = Checkpointer(TieredDirectory(NearTier(near, close_seconds=seconds), through(far)), context=watched(watch))
silent.begin()
save_steps(run, [1])
assert silent.met.wait(60)
print("saved", flush=True)
if ends == "failed":
    raise RuntimeError("no batch is left")
if ends == "closed":
    try:
        run.close()
    except Exception as error:
        print(type(error).__name__, flush=True)
"""


@pytest.mark.system
@pytest.mark.parametrize("ends", ["closed", "open"])
def test_the_program_exits_if_the_far_tier_does_not_answer(ends: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _ENDS_SILENTLY, str(tmp_path / "near"), str(tmp_path / "far"), ends],
        capture_output=True, text=True, check=True, timeout=300, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert ended.stdout.split() == ["saved", *(["UploadError"] if ends == "closed" else [])]
    if ends == "open":
        assert "ckptcore: not all steps are in" in ended.stderr and "step 1 waits" in ended.stderr


@pytest.mark.system
def test_a_program_that_fails_does_not_wait_for_uploads(tmp_path: Path) -> None:
    """A launcher may wait to restart it. Here uploads have no time limit."""
    ended = subprocess.run(
        [sys.executable, "-c", _ENDS_SILENTLY, str(tmp_path / "near"), str(tmp_path / "far"), "failed"],
        capture_output=True, text=True, check=False, timeout=300, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (1, "saved\n")
    assert "no batch is left" in ended.stderr and "step 1 waits in" in ended.stderr


_ENDS_OPEN = """
import sys, threading
from ckptcore import Checkpointer
from ckptcore_tiers import NearTier, TieredDirectory
from tests.checkpointer.runs import Watch, save_steps, through, watched
from plugins.tiers.tests.far_stores import Silence
watch = Watch()
silent = Silence(watch)
near, far, kind = sys.argv[1:]

def train():
    global run
    run = Checkpointer(TieredDirectory(near, through(far)), context=watched(watch))
    silent.begin()
    save_steps(run, [1])

training = threading.Thread(target=train, daemon=kind == "daemon")
training.start()
training.join()
assert silent.met.wait(60)

def answer():
    threading.main_thread().join()
    silent.end()
    save_steps(run, [2])

threading.Thread(target=answer).start()
"""


@pytest.mark.system
@pytest.mark.parametrize("kind", ["thread", "daemon"])
def test_a_program_that_ends_without_close_uploads_its_steps(kind: str, tmp_path: Path) -> None:
    """As its saves in the background are completed. Here the upload goes on only once the main thread has ended."""
    near, far = tmp_path / "near", tmp_path / "far"
    ended = subprocess.run(
        [sys.executable, "-c", _ENDS_OPEN, str(near), str(far), kind],
        capture_output=True, text=True, check=True, timeout=300, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert ended.stderr == ""
    assert CheckpointReader(near).steps == CheckpointReader(far).steps == (1, 2)
