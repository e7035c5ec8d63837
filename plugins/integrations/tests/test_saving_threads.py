"""Threads of adapters start after the main thread has ended, and the interpreter waits for them."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


@pytest.mark.system
def test_a_training_on_another_thread_saves_after_the_main_thread_has_ended() -> None:
    """The executors of `concurrent.futures` take no more work then."""
    done = subprocess.run([sys.executable, "-c", _AFTER_MAIN], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")
