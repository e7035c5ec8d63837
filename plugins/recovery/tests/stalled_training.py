"""Training processes that stall, as a program: ``python -m plugins.recovery.tests.stalled_training NAME DIRECTORY``.

The policy is JSON on the standard input. The program prints a line with the pid of the monitor before it stalls.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from ckptcore_recovery.watchdog import Watchdog
from ckptcore_recovery.watchdog.bounds import Bound, Kind
from ckptcore_recovery.watchdog.policy import policy_from_json
from ckptcore_tiers import NearTier, TieredDirectory

import ckptcore
from ckptcore.events import Event
from ckptcore.policies import PreemptionCheckpointing

STEP: Final = 7
BOUNDS: Final[Mapping[Kind, Bound]] = {"step": 0.5, "save": 1.0, "load": 1.0, "upload": 1.0, "delete": 1.0}
"""In seconds. The environment variable STEP_BOUND replaces the bound of steps."""


class BlockingObserver:
    """Blocks the thread that begins a phase, forever."""

    def __init__(self, phase: str) -> None:
        self._phase = phase

    def __call__(self, event: Event) -> None:
        """See `Observer`."""

    def began(self, event: Event) -> None:
        """See `BeginObserver`."""
        if event.phase == self._phase:
            wait_for_lock()


def hold_interpreter_lock() -> None:
    """Wait in C for a mutex that this thread has locked, without releasing the interpreter lock."""
    mutex = ctypes.create_string_buffer(64)
    libc = ctypes.PyDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def wait_for_lock() -> None:
    """Wait for a lock that stays locked."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def fill_pipe() -> None:
    """Write into a pipe that has no reader."""
    _, its_end = os.pipe()
    while True:
        os.write(its_end, bytes(4096))


def stop() -> None:
    """Stop this process."""
    os.kill(os.getpid(), signal.SIGSTOP)


def leave_threads() -> None:
    """Wait, exit as intended at a SIGTERM, and leave a thread for which the interpreter waits."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    threading.Thread(target=wait_for_lock).start()
    wait_for_lock()


def kill() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_test() -> None:
    """Wait for a line of the test."""
    sys.stdin.readline()


IN_STEP: Final[Mapping[str, Callable[[], None]]] = {
    "interpreter lock": hold_interpreter_lock,
    "lock": wait_for_lock,
    "pipe": fill_pipe,
    "stopped": stop,
    "leaves threads": leave_threads,
    "killed": kill,
    "test": wait_for_test,
}
IN_PHASE: Final = {"load": "read", "upload": "upload", "save": "write", "describe": "describe", "delete": "clean"}


def _say_monitor(watchdog: Watchdog) -> None:
    print(watchdog._monitor.pid, flush=True)


def _in_step(name: str, directory: str, watchdog: Watchdog) -> None:
    watchdog.step(STEP)
    _say_monitor(watchdog)
    IN_STEP[name]()


def _in_phase(name: str, directory: str, watchdog: Watchdog) -> None:
    """Stall in a phase of an operation. Every operation runs once."""
    context = ckptcore.Context(observers=[watchdog, BlockingObserver(IN_PHASE[name])])
    _say_monitor(watchdog)
    tiers = TieredDirectory(NearTier(f"{directory}/near"), f"{directory}/far")
    with ckptcore.Checkpointer(tiers, context=context) as run:
        run.save(STEP, {"w": np.ones(8)})
        run.wait()
        run.load(STEP)
        tiers.wait_for_uploads()


def _save_if_asked(name: str, directory: str, watchdog: Watchdog) -> None:
    """Take long for a step, until a save is requested. Save, and leave the loop."""
    _say_monitor(watchdog)
    with ckptcore.Checkpointer(
        f"{directory}/steps",
        save_policy=PreemptionCheckpointing(),
        preemption_notice=watchdog.save_requested,
    ) as run:
        for step in (STEP, STEP + 1):
            watchdog.step(step)
            run.save(step, {"w": np.ones(8)})
            if run.preempted:
                print("left the loop", flush=True)
                return
            while not watchdog.save_requested(step):
                time.sleep(0.01)


def _many_steps(name: str, directory: str, watchdog: Watchdog) -> None:
    """Train without a stall while the monitor is stopped; then let it go on, and stall."""
    _say_monitor(watchdog)
    os.kill(watchdog._monitor.pid, signal.SIGSTOP)
    context = ckptcore.Context(observers=[watchdog])
    with ckptcore.Checkpointer(f"{directory}/steps", context=context) as run, watchdog.pause("all steps"):
        for step in range(5000):
            watchdog.step(step)
            if step % 1000 == 0:
                run.save(step, {"w": np.ones(8)})
    watchdog.step(5000)
    assert not watchdog._is_complete  # messages were lost
    os.kill(watchdog._monitor.pid, signal.SIGCONT)
    wait_for_lock()


def _without_monitor(name: str, directory: str, watchdog: Watchdog) -> None:
    """Train while the monitor is killed."""
    _say_monitor(watchdog)
    os.kill(watchdog._monitor.pid, signal.SIGKILL)
    watchdog._thread.join()  # it notices
    for step in range(10):
        watchdog.step(step)
    ckptcore.save(f"{directory}/state", {"w": np.ones(8)}, context=ckptcore.Context(observers=[watchdog]))


def _forks(name: str, directory: str, watchdog: Watchdog) -> None:
    """Fork a child that uses the watchdog, and then one of its own. Finish a step."""
    watchdog.step(STEP)
    _say_monitor(watchdog)
    child = os.fork()
    if child == 0:
        watchdog.step(99)
        watchdog.close("failed")
        with Watchdog(f"{directory}/of-child") as own:
            own.step(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    watchdog.step(STEP + 1)


def _steps(name: str, directory: str, watchdog: Watchdog) -> None:
    """Train until a test has created a file."""
    _say_monitor(watchdog)
    for step in itertools.count():
        watchdog.step(step)
        time.sleep(0.01)
        if os.path.exists(f"{directory}/enough"):
            return


OTHER: Final = {
    "steps": _steps,
    "asked": _save_if_asked,
    "many steps": _many_steps,
    "without monitor": _without_monitor,
    "forks": _forks,
}


def main() -> None:
    """Run the process that the command line names."""
    logging.basicConfig(format="%(name)s: %(message)s")
    name, directory = sys.argv[1:3]
    policy = policy_from_json(json.loads(sys.stdin.readline()))
    task = OTHER.get(name) or (_in_step if name in IN_STEP else _in_phase)
    bounds: dict[Kind, Bound] = {**BOUNDS, "step": float(os.environ.get("STEP_BOUND", "0.5"))}
    with Watchdog(directory, policy=policy, bounds=bounds) as watchdog:
        task(name, directory, watchdog)


if __name__ == "__main__":
    main()
