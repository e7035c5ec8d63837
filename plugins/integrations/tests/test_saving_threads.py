"""Threads of adapters start after the main thread has ended, and the interpreter waits for them."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from functools import partial

import pytest
from ckptcore_integrations.saving_threads import start

_AFTER_MAIN = """
import threading
from ckptcore_integrations.saving_threads import start

ended = threading.Event()

def close():
    assert ended.wait(60)
    print("closed", flush=True)

def train():
    threading.main_thread().join()
    start(close, "saving")
    ended.set()

threading.Thread(target=train).start()
"""


_ON_A_DAEMON_THREAD = """
import threading
from ckptcore_integrations.saving_threads import start

def close():
    threading.main_thread().join()
    print("closed", flush=True)

training = threading.Thread(target=start, args=(close, "saving"), daemon=True)
training.start()
training.join()
"""

_IN_AN_EXIT_HANDLER = """
import atexit, threading
from ckptcore_integrations.saving_threads import start

def close():
    print("closed on", threading.current_thread().name, flush=True)

atexit.register(start, close, "saving")
"""


@pytest.mark.system
@pytest.mark.parametrize(
    ("program", "printed"),
    [
        (_AFTER_MAIN, "closed"),
        (_ON_A_DAEMON_THREAD, "closed"),
        (_IN_AN_EXIT_HANDLER, "closed on MainThread"),
    ],
    ids=["after the main thread", "on a daemon thread", "in an exit handler"],
)
def test_the_interpreter_waits_for_a_save(program: str, printed: str) -> None:
    """The executors of `concurrent.futures` take no work after the main thread has ended."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{printed}\n", "")


class _State:
    """Object that a save refers to."""


def test_a_failed_save_keeps_nothing_alive() -> None:
    """Its error refers to the frames that were active, and one of them knows the future, which has the error."""

    def close(state: _State) -> None:
        raise OSError(f"{state} cannot be saved")

    state = _State()
    alive = weakref.ref(state)
    gc.disable()
    try:
        future = start(partial(close, state), "failing")
        assert isinstance(future.exception(60), OSError)
        for thread in threading.enumerate():
            if thread.name == "failing":
                thread.join()
        del future, state
        assert alive() is None
    finally:
        gc.enable()
