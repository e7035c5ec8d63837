"""Preemption: a run saves once more before its machine is preempted."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from ckptcore import Checkpointer, CheckpointReader
from ckptcore.policies import AnySave, FixedInterval, PreemptionCheckpointing
from ckptcore.training.save_decisions import TerminationSignal
from tests.checkpointer.runs import assert_is_step, tree

pytestmark = pytest.mark.system

REPOSITORY: Final = Path(__file__).parents[2]

LOOP: Final = """
import os, signal, sys
from ckptcore import Checkpointer
from ckptcore.policies import *
from tests.checkpointer.runs import tree
{before}
with Checkpointer(sys.argv[1], save_policy=AnySave([FixedInterval(1000), PreemptionCheckpointing()])) as run:
    print("ready", flush=True)
    step = 0
    while not run.preempted:
        step += 1
        run.save(step, tree(step))
print("saved", step, run.latest, flush=True)
assert signal.getsignal(signal.SIGTERM) == {after}
os.kill(os.getpid(), signal.SIGTERM)
print("alive", flush=True)
"""


def run_loop(directory: str, before: str = "", after: str = "signal.SIG_DFL") -> tuple[int, list[str]]:
    """Run a training loop in a new process, and send SIGTERM. Return the exit status and the printed lines."""
    code = LOOP.format(before=before, after=after)
    process = subprocess.Popen(
        [sys.executable, "-c", code, directory],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err, err
    return process.returncode, out.splitlines()


def test_sigterm_saves_once_more_and_the_loop_ends(local: str) -> None:
    code, lines = run_loop(local)
    assert code == -signal.SIGTERM, "afterwards the signal ends the process again"
    (line,) = lines
    word, step, latest = line.split()
    assert word == "saved" and step == latest
    assert_is_step(CheckpointReader(local).load(), int(step))


def test_the_previous_handler_is_called_and_restored(local: str) -> None:
    before = (
        "def mine(number, frame): print('mine', number == signal.SIGTERM, flush=True)\n"
        "signal.signal(signal.SIGTERM, mine)"
    )
    code, lines = run_loop(local, before, "mine")
    assert code == 0
    assert lines[0] == "mine True" and lines[1].startswith("saved ") and lines[2:] == ["mine True", "alive"]


@pytest.fixture
def restored() -> Iterator[None]:
    """Ignore SIGTERM during a test, and restore the handler of this process."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGTERM, before)


def terminate() -> None:
    """Send SIGTERM to this process. Its Python handler runs before this function returns."""
    signal.raise_signal(signal.SIGTERM)


def test_the_signal_is_handled_only_if_the_policy_uses_it(local: str, restored: None) -> None:
    with Checkpointer(local, save_policy=FixedInterval(2)):
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    with Checkpointer(local, save_policy=AnySave([AnySave([PreemptionCheckpointing()]), FixedInterval(2)])) as run:
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_IGN
        assert not run.should_save(1) and not run.preempted
        terminate()
        assert run.should_save(1) and run.preempted
        assert run.save(1, tree(1)) is not None
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_a_notice_function_replaces_the_signal(directory: str, restored: None) -> None:
    with Checkpointer(
        directory, save_policy=PreemptionCheckpointing(), preemption_notice=lambda step: step == 3
    ) as run:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
        assert [run.save(step, tree(step)) is not None for step in range(5)] == [False, False, False, True, True]
        assert run.preempted


def test_outside_the_main_thread_the_error_names_the_remedy(local: str) -> None:
    caught: list[BaseException] = []

    def make() -> None:
        try:
            Checkpointer(local, save_policy=PreemptionCheckpointing())
        except ValueError as error:
            caught.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0]) and "preemption_notice" in str(caught[0])
    Checkpointer(local).close()  # the directory was released


def test_two_checkpointers_handle_the_signal_and_restore_it_in_any_order(restored: None) -> None:
    for order in ((0, 1), (1, 0)):
        calls: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame, calls=calls: calls.append(number))  # type: ignore[misc]
        both = [TerminationSignal(), TerminationSignal()]
        terminate()
        assert [heard(1) for heard in both] == [True, True]
        assert len(calls) == 1
        for which in order:
            both[which].close()
            both[which].close()
        terminate()
        assert len(calls) == 2, "who listened before still does"


def test_a_handler_installed_later_is_kept(restored: None) -> None:
    calls: list[int] = []
    with contextlib.closing(TerminationSignal()) as heard:
        ours = signal.getsignal(signal.SIGTERM)

        def chained(number: int, frame: object) -> None:
            calls.append(number)
            assert callable(ours)
            ours(number, None)

        signal.signal(signal.SIGTERM, chained)
        terminate()
        assert heard(1) and calls == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == chained
    terminate()
    assert len(calls) == 2


CLOSED_ELSEWHERE: Final = """
import os, signal, threading
from ckptcore.training.save_decisions import TerminationSignal
heard = TerminationSignal()
thread = threading.Thread(target=heard.close)
thread.start()
thread.join()
print("closed", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("alive", flush=True)
"""


def test_after_close_on_another_thread_the_signal_ends_the_process() -> None:
    process = subprocess.run(
        [sys.executable, "-c", CLOSED_ELSEWHERE], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stdout) == (-signal.SIGTERM, "closed\n"), process.stderr


FORKS: Final = """
import contextlib, os, signal
from ckptcore.training.save_decisions import TerminationSignal

with contextlib.closing(TerminationSignal()) as heard:
    pid = os.fork()
    if pid == 0:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    assert not heard(1)
    signal.raise_signal(signal.SIGTERM)
    assert heard(1)
"""


def test_a_forked_child_can_be_ended() -> None:
    """Data loaders fork workers and end them by SIGTERM. Runs in a new program without threads of other tests."""
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=120)
