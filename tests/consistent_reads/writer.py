"""A writer that makes random changes to one location, determined by a seed, and logs each change."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import ckptcore
from ckptcore.model import JSON
from tests.consistent_reads.states import LAYOUTS, save_composite, save_tree, save_update, tree_of

_VERSIONS: Final = 3


@dataclass(frozen=True, slots=True)
class State:
    """The state of a location.

    Attributes:
        kind: one of `STATES`.
        version: the saved version.
        layout: the layout of the save.
    """

    kind: str
    version: int
    layout: str


NOTHING: Final = State("nothing", 0, "")


class Log:
    """The log of a writer. It has a line before and a line after each change."""

    def __init__(self, path: Path) -> None:
        """Use an existing file."""
        self._path = path
        self._read = 0

    def begin(self, state: State) -> None:
        """Log a state before the change to it."""
        self._append([state.kind, state.version, state.layout])

    def end(self) -> None:
        """Log that the change is complete."""
        self._append(None)

    def _append(self, line: JSON) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, (json.dumps(line) + "\n").encode())
        finally:
            os.close(descriptor)

    def news(self) -> Iterator[State | None]:
        """Return the new log entries: a state before its change, and None after it."""
        with self._path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            entry = json.loads(line)
            yield None if entry is None else State(*entry)


class _Writer:
    def __init__(self, seed: int, location: str, log: Log, context: ckptcore.Context) -> None:
        self._draw = random.Random(seed)
        self._location = location
        self._base = f"{location.rpartition('/')[0]}/base"
        self._log = log
        self._context = context
        self._state = NOTHING
        self._bases: State | None = None

    def change(self) -> None:
        """Make a change, which may consist of several steps."""
        changes: Mapping[str, Callable[[str, int], None]] = {
            "tree": self._save_tree,
            "several": self._save_several,
            "update": self._save_update,
            "partial": self._save_sessions,
            "nothing": self._delete,
        }
        kind = self._draw.choice([*changes, "tree", "tree", "several", "several", "update"])
        changes[kind](self._draw.choice(LAYOUTS), self._draw.randrange(1, 1 + _VERSIONS))

    def _to(self, state: State, change: Callable[[], None]) -> None:
        self._log.begin(state)
        change()
        self._log.end()
        self._state = state

    def _save_tree(self, layout: str, version: int) -> None:
        self._to(
            State("tree", version, layout),
            lambda: save_tree(version, layout, self._location, overwrite="non-atomic", context=self._context),
        )

    def _save_several(self, layout: str, version: int) -> None:
        self._to(
            State("several", version, layout),
            lambda: save_composite(version, layout, self._location, overwrite="non-atomic", context=self._context),
        )

    def _save_update(self, layout: str, version: int) -> None:
        base = State("tree", version, layout)
        if self._bases != base:
            if self._state.kind == "update":
                self._delete(layout, version)
            save_tree(version, layout, self._base, overwrite="non-atomic", context=self._context)
            self._bases = base
        self._to(
            State("update", version, layout),
            lambda: save_update(
                version, layout, self._location, base=self._base, overwrite="non-atomic", context=self._context
            ),
        )

    def _save_sessions(self, layout: str, version: int) -> None:
        if self._state != NOTHING:
            self._delete(layout, version)
        tree = tree_of(version)
        first = {key: tree[key] for key in ("version", "a")}
        self._to(
            State("partial", version, layout),
            lambda: ckptcore.partial(self._location, layout=layout, context=self._context).save(first),
        )
        if self._draw.random() < 0.3:
            self._delete(layout, version)
            return
        rest = {"b": tree["b"]}
        self._to(
            State("partial", version, layout),
            lambda: ckptcore.partial(self._location, layout=layout, context=self._context).save(rest),
        )
        self._to(
            State("tree", version, layout),
            lambda: ckptcore.partial(self._location, context=self._context).finalize(metadata={"version": version}),
        )

    def _delete(self, layout: str, version: int) -> None:
        if self._state != NOTHING:
            self._to(NOTHING, lambda: ckptcore.delete(self._location, context=self._context))
        if self._bases is not None and self._draw.random() < 0.5:
            ckptcore.delete(self._base, context=self._context)
            self._bases = None


def write(seed: int, location: str, log: Log, context: ckptcore.Context, is_stopped: Callable[[], bool]) -> None:
    """Change a location until `is_stopped` returns True."""
    writer = _Writer(seed, location, log, context)
    draw = random.Random(seed)
    while not is_stopped():
        began = time.monotonic()
        writer.change()
        time.sleep((time.monotonic() - began) * 2 * draw.random())  # a pause, so that some reads see no change


def main(seed: str, location: str, log: str, storage: str) -> None:
    """Write until the standard input is closed."""
    stopped = threading.Event()

    def wait() -> None:
        sys.stdin.buffer.read()
        stopped.set()

    threading.Thread(target=wait, daemon=True).start()
    context = ckptcore.Context(storage=json.loads(storage), io=ckptcore.context.IOOptions(threads=2), durability="none")
    write(int(seed), location, Log(Path(log)), context, stopped.is_set)


if __name__ == "__main__":
    main(*sys.argv[1:])
