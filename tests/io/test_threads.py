"""Threads start when needed, end when idle, and survive a fork and the end of the program."""

from __future__ import annotations

import os
import threading

import pytest

from ckptcore.io.threads import IOThreads
from tests.io.programs import run_program


def test_no_more_threads_start_than_allowed() -> None:
    threads = IOThreads(2)
    names: set[str] = set()
    release = threading.Event()

    def work() -> None:
        names.add(threading.current_thread().name + str(threading.get_ident()))
        release.wait()

    futures = [threads.submit(work) for _ in range(6)]
    release.set()
    for future in futures:
        future.result(10)
    assert 1 <= len(names) <= 2
    assert all(name.startswith("ckptcore-io") for name in names)


def test_the_default_is_one_thread_per_processor_from_two_to_eight() -> None:
    assert IOThreads().count == min(8, max(2, os.cpu_count() or 2))
    with pytest.raises(ValueError, match="at least one"):
        IOThreads(0)


def test_errors_are_raised_by_result() -> None:
    def fail() -> int:
        raise KeyError("no")

    with pytest.raises(KeyError, match="no"):
        IOThreads(1).submit(fail).result(10)


def test_run_uses_the_calling_thread_and_waits_for_all() -> None:
    threads = IOThreads(3)
    together = threading.Barrier(3)
    seen: set[int] = set()

    def work() -> None:
        together.wait(10)  # fails unless three threads wait at once
        seen.add(threading.get_ident())

    threads.run(work, 3)
    assert len(seen) == 3 and threading.get_ident() in seen


def test_run_does_not_wait_for_threads_that_have_not_started() -> None:
    threads = IOThreads(1)
    release = threading.Event()
    busy = threads.submit(release.wait)
    done: list[int] = []
    threads.run(lambda: done.append(1), 5)
    assert done == [1]
    release.set()
    busy.result(10)
    assert threads.submit(lambda: len(done)).result(10) == 1  # a worker that starts late has no work left


def test_run_can_be_nested() -> None:
    threads = IOThreads(2)
    done: list[int] = []
    threads.run(lambda: threads.run(lambda: done.append(1), 2), 2)
    assert len(done) >= 1


def test_threads_end_when_their_pool_is_deleted() -> None:
    threads = IOThreads(1)
    thread = threads.submit(threading.current_thread).result(10)
    del threads
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.system
def test_a_forked_child_starts_threads_of_its_own() -> None:
    assert (
        run_program(
            "import os\n"
            "from ckptcore.io.threads import IOThreads\n"
            "threads = IOThreads(2)\n"
            "assert threads.submit(os.getpid).result(10) == os.getpid()\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            "    os._exit(0 if threads.submit(os.getpid).result(10) == os.getpid() else 1)\n"
            "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), threads.submit(lambda: 5).result(10))\n"
        )
        == "0 5\n"
    )


@pytest.mark.system
def test_work_continues_while_the_interpreter_joins_threads_at_exit() -> None:
    assert (
        run_program(
            "import threading, atexit\n"
            "from ckptcore.io.threads import IOThreads\n"
            "threads = IOThreads(2)\n"
            "def save():\n"
            "    threading.main_thread().join()\n"
            "    print(threads.submit(lambda: 'saved').result(10))\n"
            "threading.Thread(target=save).start()\n"
            "atexit.register(lambda: print(threads.submit(lambda: 'at exit').result(10)))\n"
        )
        == "saved\nat exit\n"
    )
