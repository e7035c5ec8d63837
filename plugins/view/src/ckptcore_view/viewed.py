"""Viewed locations: the runs, checkpoints and trees that the page can show. Each is opened at its first use."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from typing import Any, Final, Literal, TypeAlias, TypeVar

from ckptcore_tools.locations import child_location, names_in
from ckptcore_tools.run_steps import find_steps

from ckptcore.commit.location import resolve_location
from ckptcore.commit.root_json import summarize_root
from ckptcore.commit.stored_root import root_version
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidLocationError,
    UncommittedCheckpointError,
)
from ckptcore.opening.checkpoint import CompositeCheckpoint
from ckptcore.opening.open_checkpoints import ConsistentRead, open_either
from ckptcore.runtime import runtime_of
from ckptcore.step_names import StepNames
from ckptcore.training.steps import StepDirectory
from ckptcore_view.open_tree import OpenTree

OTHER: Final = "//other"
"""Place of the checkpoint that the viewed one is compared with. No name in a storage begins with slashes."""

ViewedKind: TypeAlias = Literal["run", "runs", "tree", "checkpointables"]

_MAX_OPEN: Final = 8
"""Limit of open checkpoints. Each keeps files open, and its tree in memory."""

_MAX_CHILDREN: Final = 100
"""Limit of the directories of a folder that are checked for runs. Each check costs a few requests."""

_REMEMBERED_SECONDS: Final = 60.0

T = TypeVar("T")


class Viewed:
    """The subject of the page: a run, a folder of runs, or a checkpoint of one tree or several. Thread-safe.

    Runs, steps and checkpointables have a *place*: a path relative to the viewed location, with ``/`` between its
    parts. The place of the location itself is empty. A step of a run has the place ``200``, a checkpointable in it
    ``200/model``. In a folder of runs, the name of the run comes first.

    Attributes:
        location: the viewed location, as the user wrote it.
        other: the location of the checkpoint to compare with; empty if there is none.
        other_has_parts: True if `other` is a checkpoint of several checkpointables.
        policy: the text of a preservation policy. The page of a run shows the steps that it keeps. Empty for none.
        kind: the kind of the subject.
        children: the runs and the checkpoints in a folder of runs, by name.
    """

    def __init__(
        self,
        location: str,
        context: Context,
        *,
        other: str = "",
        policy: str = "",
        step_names: StepNames | None = None,
    ) -> None:
        """Determine the kind of a location.

        Args:
            location: a path or URL of a run or checkpoint.
            context: options.
            other: a checkpoint to compare with.
            policy: the text of a preservation policy.
            step_names: the names of steps; None for the usual names.

        Raises:
            CheckpointNotFoundError: there is neither a checkpoint nor a run.
            CheckpointError: the checkpoint cannot be read.
        """
        self.location = os.path.expanduser(location)
        self.other = os.path.expanduser(other)
        self.policy = policy
        self.context = context
        self._step_names = StepNames() if step_names is None else step_names
        self._remembered: dict[Hashable, tuple[float, Any]] = {}
        self._lock = threading.Lock()
        self._open: OrderedDict[str, OpenTree] = OrderedDict()
        self.children: Mapping[str, Literal["run", "checkpoint"]] = {}
        self.kind: ViewedKind = self._find_kind()
        self.other_has_parts = bool(other) and self.members(OTHER) is not None

    @property
    def policy_error(self) -> str:
        """The reason why the policy cannot be shown; empty if it can."""
        if not self.policy or self.kind in ("run", "runs"):
            return ""
        return f"{self.location} is a checkpoint, and a policy chooses steps of a run: leave the policy out"

    def steps(self, place: str = "") -> StepDirectory:
        """List the steps of the run at a place."""
        return find_steps(self.locate(place), self._step_names, self.context)

    def recall(self, key: Hashable) -> Any:
        """Return a cached value that is less than a minute old, or None. Older values may be wrong."""
        since, value = self._remembered.get(key, (-math.inf, None))
        return value if time.monotonic() - since < _REMEMBERED_SECONDS else None

    def remember(self, key: Hashable, value: object) -> None:
        """Cache a value for a minute, because the page polls every few seconds and object stores are slow."""
        self._remembered[key] = time.monotonic(), value

    def locate(self, place: str) -> str:
        """Return the location of a place.

        Raises:
            CheckpointNotFoundError: the place does not exist. Places come from a URL, so only listed names are
                accepted.
        """
        location, path = self.location, place
        if place == OTHER or place.startswith(f"{OTHER}/"):
            if not self.other:
                raise CheckpointNotFoundError("there is no other checkpoint to compare with: use --compare")
            location, path = self.other, place[len(OTHER) + 1 :]
        for name in path.split("/") if path else ():
            if name not in {listed.rstrip("/") for listed in names_in(location, self.context)}:
                raise CheckpointNotFoundError(f"{location} has no {name!r}")
            location = child_location(location, name)
        return location

    def members(self, place: str) -> CompositeCheckpoint | None:
        """Return the checkpoint of several checkpointables at a place; None for one tree.

        Raises:
            CheckpointError: there is no checkpoint, or it cannot be read.
        """
        location = self.locate(place)
        root = root_version(resolve_location(location, runtime_of(self.context).storages).store)
        try:
            if isinstance(root, bytes) and (summary := summarize_root(root)).committed and summary.members is None:
                return None  # fast path: the tree is not parsed
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{location}: {error}", key=error.key) from error
        members = ConsistentRead(location, self.context, open_either).open()
        return members if isinstance(members, CompositeCheckpoint) else None

    def read(self, place: str, read: Callable[[OpenTree], T]) -> T:
        """Call a function with the open tree at a place. If the tree was replaced, open it again and repeat the call.

        Raises:
            CheckpointError: there is no checkpoint, or it cannot be read.
            Errors of `read`.
        """
        open_tree = self._opened(place)
        if open_tree is not None:
            try:
                return read(open_tree)
            except CheckpointNotFoundError:
                if open_tree.is_current():
                    raise
        return read(self._open_tree(place))

    def read_current(self, place: str, read: Callable[[OpenTree], T]) -> T:
        """Call a function with the current tree at a place. See `read`."""
        open_tree = self._opened(place)
        if open_tree is not None and open_tree.is_current():
            return self.read(place, read)
        return read(self._open_tree(place))

    def _opened(self, place: str) -> OpenTree | None:
        with self._lock:
            if place in self._open:
                self._open.move_to_end(place)
            return self._open.get(place)

    def _open_tree(self, place: str) -> OpenTree:
        open_tree = OpenTree(self.locate(place), self.context)
        with self._lock:
            self._open.pop(place, None)
            self._open[place] = open_tree
            if len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)  # closed once no thread reads from it
        return open_tree

    def _find_kind(self) -> ViewedKind:
        try:
            return "tree" if self.members("") is None else "checkpointables"
        except UncommittedCheckpointError:
            raise
        except (CheckpointNotFoundError, InvalidLocationError) as error:  # the root of a storage can be a run
            if self._is_run():
                return "run"
            if self.find_children():
                return "runs"
            if isinstance(error, InvalidLocationError):
                raise
            raise CheckpointNotFoundError(
                f"{self.location} is neither a checkpoint nor a directory with steps, and has no such directories: "
                f"{error}"
            ) from error

    def find_children(self) -> Mapping[str, Literal["run", "checkpoint"]]:
        """Return the runs and checkpoints among the first directories of a folder. Sets `children`."""
        try:
            names = [name[:-1] for name in names_in(self.location, self.context) if name.endswith("/")]
        except (CheckpointNotFoundError, InvalidLocationError):
            return {}
        children: dict[str, Literal["run", "checkpoint"]] = {}
        for name in sorted(name for name in names if not name.startswith("."))[:_MAX_CHILDREN]:
            if self.children.get(name) is not None:
                children[name] = self.children[name]
                continue
            location = child_location(self.location, name)
            with suppress(CheckpointError):
                steps = find_steps(location, self._step_names, self.context)
                if steps.candidates() or steps.leftovers:
                    children[name] = "run"
                    continue
            with suppress(CheckpointError):
                ConsistentRead(location, self.context, open_either).open()
                children[name] = "checkpoint"
        self.children = children
        return children

    def _is_run(self) -> bool:
        """Return True for a directory with steps. Also for an empty directory, whose first step may be saved later."""
        try:
            steps = self.steps()
        except (CheckpointNotFoundError, InvalidLocationError):
            return False
        return bool(steps.candidates() or steps.leftovers or not names_in(self.location, self.context))
