"""A program that runs tasks that tests kill. It has imported all modules, and forks a child for each task.

The program reads a line of JSON, ``{"task": name, "location": path, "number": state}``, and writes the process id of
the child for the task. The child begins after the next line, whatever its content. When the child has ended, the
program writes the exit status: negative for a signal, `LOST` if the save lost to another save.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import numpy as np
from ckptcore_orbax import OcdbtLayout

import ckptcore
from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.errors import CheckpointExistsError, SaveLostError
from tests.crashes.states import LARGE, SMALL, make_composite, make_state

OLD: Final = 1
"""The state before a task."""

NEW: Final = 2
"""The state that a task saves."""


LOST: Final = 3
"""Exit status of a task whose save lost to another save."""


def _context(durability: Literal["full", "none"] = "full") -> ckptcore.Context:
    # One thread, so that every run makes the same system calls.
    return ckptcore.Context(durability=durability, io=ckptcore.context.IOOptions(threads=1))


def _save(location: str, number: int) -> None:
    ckptcore.save(location, make_state(number), overwrite=True, context=_context())


def _save_new(location: str, number: int) -> None:
    ckptcore.save(location, make_state(number), context=_context())


def _save_without_durability(location: str, number: int) -> None:
    ckptcore.save(location, make_state(number), overwrite=True, context=_context("none"))


def _save_several_files(location: str, number: int) -> None:
    layout = SafetensorsLayout(max_file_bytes=SMALL)
    ckptcore.save(location, make_state(number), layout=layout, overwrite=True, context=_context())


def _save_large(location: str, number: int) -> None:
    ckptcore.save(location, make_state(number, LARGE), overwrite=True, context=_context())


def _save_with_threads(location: str, number: int) -> None:
    ckptcore.save(
        location,
        make_state(number, LARGE),
        overwrite=True,
        context=ckptcore.Context(io=ckptcore.context.IOOptions(threads=4)),
    )


def _save_in_background(location: str, number: int) -> None:
    ckptcore.save_async(location, make_state(number), overwrite=True, context=_context()).result()


def _save_in_bounded_memory(location: str, number: int) -> None:
    context = ckptcore.Context(
        io=ckptcore.context.IOOptions(threads=1), memory=ckptcore.context.MemoryOptions(save_bytes=300)
    )
    ckptcore.save_async(location, make_state(number), overwrite=True, context=context).result()


def _save_with_export(location: str, number: int) -> None:
    exports = [ckptcore.Export(location=exported(location), layout=OcdbtLayout())]
    ckptcore.save_async(
        location, make_state(number), overwrite=True, strategy=ckptcore.WithExports(exports), context=_context()
    ).result()


def exported(location: str) -> str:
    """Return the location of the export, next to the directory of the checkpoint."""
    directory, name = os.path.split(location)
    return os.path.join(os.path.dirname(directory), "exported", name)


def _save_non_atomic(location: str, number: int) -> None:
    """Overwrite with `non-atomic`. This is atomic on a file system that can exchange directories."""
    ckptcore.save(location, make_state(number), overwrite="non-atomic", context=_context())


def _save_beside_others(location: str, number: int) -> None:
    ckptcore.save(location, make_state(number), layout="dcp", overwrite="keep-other-files", context=_context())


def _convert(location: str, number: int) -> None:
    source = "memory://crashes/source"
    ckptcore.save(source, make_state(number), overwrite="non-atomic", context=_context())
    ckptcore.copy(source, location, layout="safetensors", overwrite=True, context=_context())


def copied_from(location: str) -> str:
    """Return the source of the copy, next to the directory of the checkpoint."""
    directory, name = os.path.split(location)
    return os.path.join(os.path.dirname(directory), "source", name)


def _copy(location: str, number: int) -> None:
    ckptcore.copy(copied_from(location), location, overwrite=True, context=_context())


def _copy_with_threads(location: str, number: int) -> None:
    ckptcore.copy(copied_from(location), location, context=ckptcore.Context(io=ckptcore.context.IOOptions(threads=4)))


def _save_composite(location: str, number: int) -> None:
    ckptcore.save_checkpointables(location, make_composite(number), overwrite=True, context=_context())


def _save_composite_in_background(location: str, number: int) -> None:
    context = ckptcore.Context(
        io=ckptcore.context.IOOptions(threads=1), memory=ckptcore.context.MemoryOptions(save_bytes=300)
    )
    ckptcore.save_checkpointables_async(location, make_composite(number), overwrite=True, context=context).result()


def _convert_composite(location: str, number: int) -> None:
    source = "memory://crashes/composite"
    ckptcore.save_checkpointables(source, make_composite(number), overwrite="non-atomic", context=_context())
    ckptcore.copy(source, location, layout="safetensors", overwrite=True, context=_context())


def _save_ocdbt(location: str, number: int) -> None:
    ckptcore.save(location, make_state(number), layout="ocdbt", overwrite=True, context=_context())


def _save_ocdbt_compressed(location: str, number: int) -> None:
    layout = OcdbtLayout(compression="zstd", chunk_bytes=64, data_file_bytes=100)
    ckptcore.save(location, make_state(number), layout=layout, overwrite=True, context=_context())


def _save_zarr3(location: str, number: int) -> None:
    ckptcore.save(location, make_state(number), layout="zarr3", overwrite=True, context=_context())


def _save_composite_ocdbt(location: str, number: int) -> None:
    ckptcore.save_checkpointables(location, make_composite(number), layout="ocdbt", overwrite=True, context=_context())


def _delete(location: str, number: int) -> None:
    ckptcore.delete(location, context=_context())


def _delete_and_save(location: str, number: int) -> None:
    """Delete and save, which is unsafe. A test must detect this."""
    ckptcore.delete(location, context=_context())
    ckptcore.save(location, make_state(number), context=_context())


def partial_state(number: int) -> dict[str, Any]:
    """Return the state of session `number` of a partial save. Different sessions have no array in common."""
    return {
        "arrays": {f"array {number}": np.random.default_rng(number).integers(0, 1000, 50)},
        "sessions": "several",
        f"text {number}": "x" * number,
    }


def _save_partial(location: str, number: int) -> None:
    ckptcore.partial(location, context=_context()).save(partial_state(1))


def _finalize(location: str, number: int) -> None:
    ckptcore.partial(location, context=_context()).finalize()


def _replace_often(location: str, number: int) -> None:
    """Replace a checkpoint with states 1 to `number`. Vary the number of files, and the size of the root."""
    context = _context("none")
    layouts = SafetensorsLayout(), SafetensorsLayout(max_file_bytes=SMALL)
    for version in range(1, number + 1):
        notes = {"long": "x" * 300_000} if version % 3 == 0 else {}
        state = make_state(version)
        ckptcore.save(location, state, layout=layouts[version % 2], overwrite=True, metadata=notes, context=context)


TASKS: Final[Mapping[str, Callable[[str, int], None]]] = {
    "save": _save,
    "save-new": _save_new,
    "save-without-durability": _save_without_durability,
    "save-several-files": _save_several_files,
    "save-large": _save_large,
    "save-with-threads": _save_with_threads,
    "save-in-background": _save_in_background,
    "save-in-bounded-memory": _save_in_bounded_memory,
    "save-with-export": _save_with_export,
    "save-non-atomic": _save_non_atomic,
    "save-beside-others": _save_beside_others,
    "save-ocdbt": _save_ocdbt,
    "save-ocdbt-compressed": _save_ocdbt_compressed,
    "save-zarr3": _save_zarr3,
    "save-composite-ocdbt": _save_composite_ocdbt,
    "convert": _convert,
    "copy": _copy,
    "copy-with-threads": _copy_with_threads,
    "save-composite": _save_composite,
    "save-composite-in-background": _save_composite_in_background,
    "convert-composite": _convert_composite,
    "delete": _delete,
    "save-partial": _save_partial,
    "finalize": _finalize,
    "delete-and-save": _delete_and_save,
    "replace-often": _replace_often,
}
"""Tasks that can be killed, by name."""


def _serve() -> None:
    _save_new("memory://crashes/warm", NEW)  # runs late imports before any child is forked
    _save_composite("memory://crashes/warm-composite", NEW)
    _save_partial("memory://crashes/warm-partial", NEW)
    _finalize("memory://crashes/warm-partial", NEW)
    for line in sys.stdin:
        order = json.loads(line)
        begin, released = os.pipe()
        child = os.fork()
        if child == 0:
            _child(order, begin)
        os.close(begin)
        print(child, flush=True)
        sys.stdin.readline()
        with contextlib.suppress(BrokenPipeError):  # the child may have been killed before it waits
            os.write(released, b"!")
        os.close(released)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _child(order: Mapping[str, Any], begin: int) -> None:
    """Run a task, and end the process."""
    try:
        signal.alarm(60)  # a task that hangs must end, with a signal that no test expects
        os.read(begin, 1)
        TASKS[order["task"]](order["location"], order["number"])
    except (CheckpointExistsError, SaveLostError):
        os._exit(LOST)
    except BaseException:  # noqa: BLE001  # the exit status is for the test, the text for people
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    _serve()
