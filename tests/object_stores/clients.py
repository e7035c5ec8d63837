"""A program that runs tasks that tests kill at a request. It has imported all modules, and forks a child for each task.

The program reads a `Task` as a line of JSON, and writes the process id of the child that runs the task. When the child
has ended, it writes the exit status: negative for a signal. No storage is opened before the fork, because clients of
object stores do not survive a fork.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import Final, Literal

import ckptcore
from ckptcore.model import JSON
from tests.crashes.states import make_state
from tests.crashes.warm import WarmProgram

_SECONDS: Final = 120

Program = Literal["save", "overwrite", "step"]


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """The task of a child process.

    Attributes:
        program: save a first checkpoint; replace a checkpoint; or save the next step of a directory.
        location: the location of the checkpoint, or of the directory of steps.
        number: the number of the saved state, and of the step.
        layout: the layout.
        storage: options of storages by scheme.
        elements: number of elements of an array of the state.
    """

    program: Program
    location: str
    number: int
    layout: str
    storage: Mapping[str, Mapping[str, JSON]]
    elements: int


def do(task: Task) -> None:
    """Run a task in this process, on one thread, so that every run makes the same requests."""
    context = ckptcore.Context(io=ckptcore.context.IOOptions(threads=1), storage=task.storage)
    state = make_state(task.number, task.elements)
    if task.program == "step":
        with ckptcore.Checkpointer(task.location, layout=task.layout, context=context) as checkpointer:
            checkpointer.save_blocking(task.number, state)
        return
    overwrite: bool | Literal["non-atomic"] = "non-atomic" if task.program == "overwrite" else False
    ckptcore.save(task.location, state, layout=task.layout, overwrite=overwrite, context=context)


class Client(WarmProgram):
    """A handle of the program in the test process."""

    def __init__(self) -> None:
        super().__init__("tests.object_stores.clients")

    def start(self, task: Task) -> int:
        """Start a task in a child, and return its process id. `end` must follow."""
        self.say(json.dumps(dataclasses.asdict(task)))
        return self.hear()


def _warm() -> None:
    """Import the modules that tasks need."""
    for layout in ("safetensors", "dcp"):
        ckptcore.save(
            f"memory://warm/{layout}",
            make_state(1),
            layout=layout,
            context=ckptcore.Context(io=ckptcore.context.IOOptions(threads=1)),
        )
    import ckptcore_orbax.orbax.layouts  # noqa: F401  # only imported: its threads would not survive a fork


def _serve() -> None:
    _warm()
    for line in sys.stdin:
        task = Task(**json.loads(line))
        child = os.fork()
        if child == 0:
            _child(task)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _child(task: Task) -> None:
    """Run a task, and end the process."""
    try:
        signal.alarm(_SECONDS)  # a task that hangs must end, with a signal that no test expects
        do(task)
    except BaseException:  # noqa: BLE001  # the exit status is for the test, the text for people
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    _serve()
