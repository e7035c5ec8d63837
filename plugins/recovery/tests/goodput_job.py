"""A job of one process that is killed and restarted: ``python -m ... watchdog|log DIRECTORY STOP``.

It saves every fifth step. In the step STOP it says so, and waits until it is killed. It ends after step 20.
"""

from __future__ import annotations

import signal
import sys
from typing import Any, Final

import numpy as np
from ckptcore_recovery.watchdog import RunLog, Watchdog, run_log_writer

import ckptcore

LAST: Final = 20


def main(kind: str, directory: str, stop: int) -> None:
    """Train."""
    run_log_writer._WRITE_SECONDS = 0.01  # type: ignore[misc]  # a killed process that writes its own log loses the rest
    with (
        Watchdog(directory) if kind == "watchdog" else RunLog(directory) as log,
        ckptcore.Checkpointer(directory, context=ckptcore.Context(observers=[log])) as run,
    ):
        state: Any = {"w": np.zeros(8), "step": 0} if run.latest is None else run.load()
        for step in range(state["step"] + 1, LAST + 1):
            log.step(step)
            if step == stop:
                print("stopped", flush=True)
                signal.pause()
            state = {"w": state["w"] + 1, "step": step}
            if step % 5 == 0:
                run.save_blocking(step, state)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
