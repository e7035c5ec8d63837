"""A program that imports a trainer once and forks a child for each run. Tests that kill many runs then start them fast.

``python -m tests.resume.warm MODULE MORE...`` imports all these modules, and reads lines of JSON. ``{"arguments":
[...], "output": path}`` starts ``MODULE.main(arguments)`` in a child, whose standard output and error go to `path` and
``path + ".err"``, and writes its process id. ``{"wait": process id}`` waits for a child and writes its exit status:
negative for a signal.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Final

_SECONDS: Final = 300
"""Time limit of a child in seconds, so that a child that hangs ends and fails its test."""


def _serve(main: Callable[[Sequence[str]], None]) -> None:
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        child = os.fork()
        if child == 0:
            _run(main, order["arguments"], order["output"])
        print(child, flush=True)


def _run(main: Callable[[Sequence[str]], None], arguments: Sequence[str], output: str) -> None:
    """Run a child process to its end. Do not return."""
    try:
        signal.alarm(_SECONDS)
        for descriptor, path in ((0, os.devnull), (1, output), (2, f"{output}.err")):
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(file, descriptor)
            os.close(file)
        main(arguments)
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001  # the exit status tells the test, and the text a person
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    trainer, *_ = [importlib.import_module(name) for name in sys.argv[1:]]
    _serve(trainer.main)
