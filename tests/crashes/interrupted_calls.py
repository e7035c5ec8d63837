"""A program whose signal handler calls ckptcore during the first call of ckptcore in the process."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import ckptcore

STATE = {"w": np.arange(8.0), "step": 3}

EVERYWHERE = -1
"""At every opened file, instead of at one import. Then the first handler has imported most modules."""

_DISTANCE = 25
"""Distance of the imports that are interrupted."""


class SignalAtImport(MetaPathFinder):
    """A finder that sends a signal to this process at one import. At this time the importing modules are incomplete."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        self.count += 1
        if self.count - 1 == self.at:
            signal.raise_signal(signal.SIGTERM)


def run(directory: Path, call: str, nested: str, at: int) -> dict[str, Any]:
    """Run a call, and a nested call in the signal handler. Return the outcomes of the nested calls."""
    calls: dict[str, Callable[[Path], Any]] = {
        "save": lambda path: ckptcore.save(path, STATE),
        "save_async": lambda path: ckptcore.save_async(path, STATE).result(),
        "load": lambda path: ckptcore.load(directory.parent / "there"),
        "save_checkpointables": lambda path: ckptcore.save_checkpointables(path, {"a": STATE}),
        "checkpointer": lambda path: ckptcore.Checkpointer(path).save(1, STATE),
        "step": lambda path: step(),
        "policies": lambda path: ckptcore.policies.EveryStep(),
    }
    checkpointer = ckptcore.Checkpointer(directory / "run") if "step" in (call, nested) else None

    def step() -> None:
        assert checkpointer is not None
        handle = checkpointer.save(2, STATE)
        assert handle is not None
        handle.result()

    finder = SignalAtImport(at)
    outcomes: list[str] = []
    inside = False

    def handle(signum: int, frame: object) -> None:
        nonlocal inside
        if inside:
            return
        inside = True
        try:
            calls[nested](directory / f"nested-{len(outcomes)}")
            outcomes.append("done")
        except Exception as error:  # noqa: BLE001  # the test looks at it
            outcomes.append(f"{type(error).__name__}: {error}")
        finally:
            inside = False

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and not inside:
            signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, handle)
    sys.meta_path.insert(0, finder)
    if at == EVERYWHERE:
        sys.addaudithook(audit)
    calls[call](directory / "first")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return {"at": at, "imports": finder.count, "outcomes": outcomes}


def main(directory: Path, call: str, nested: str) -> None:
    """Run the calls in a child for each interrupted import, and print the results. Each child is a fork."""
    for at in itertools.chain([EVERYWHERE], itertools.count(0, _DISTANCE)):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            _run_in_child(directory / f"at-{at}", call, nested, at, writing)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            result = json.loads(pipe.read())
        os.waitpid(child, 0)
        print(json.dumps(result))
        if at >= result["imports"]:
            return


def _run_in_child(directory: Path, call: str, nested: str, at: int, writing: int) -> NoReturn:
    directory.mkdir()
    try:
        result = run(directory, call, nested, at)
    except BaseException as error:  # noqa: BLE001  # the test looks at it
        result = {"at": at, "imports": 0, "outcomes": [f"the call failed: {type(error).__name__}: {error}"]}
    with os.fdopen(writing, "w") as pipe:
        pipe.write(json.dumps(result))
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
