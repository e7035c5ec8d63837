"""Runtime: the running state of a Context, such as its plugins, threads, memory and running saves."""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING, Final

from ckptcore.commit.location import Storages
from ckptcore.commit.method import StorageSupport
from ckptcore.context import Context
from ckptcore.errors import CheckpointError
from ckptcore.io.background import BackgroundSaves
from ckptcore.io.memory import StagingPool
from ckptcore.io.threads import IOThreads
from ckptcore.job.agreement import exchange_counts
from ckptcore.plugins import Plugins, installed_plugins
from ckptcore.progress import ProgressCallback, show_progress
from ckptcore.protocols import Coordinator, Executor, Rejoinable

if TYPE_CHECKING:
    from ckptcore.commit.stored_root import ParsedRoots
    from ckptcore.io.chunk_reads import StoredFormat

_ATTRIBUTE = "_runtime"

_VARIABLE_ARGUMENTS: Final = 4
"""The value of `inspect.CO_VARARGS`. Importing `inspect` takes long."""


class Runtime:
    """The state that saves and loads with one Context share. Threads and memory are created when they are first used.

    Attributes:
        saves: the asynchronous saves that are running, or failed with an error that was not retrieved.
        hints: hints that were logged, so that each is logged only once.
    """

    def __init__(self, context: Context, registry: Plugins | None = None) -> None:
        """Create the state of a Context.

        Args:
            context: the options. No reference to the Context is stored, because the Context owns its Runtime.
            registry: the plugins to use; None: the installed plugins and the plugins of the Context.
        """
        self._io = context.io
        self._job = context.job
        self._plugins = context.plugins
        self._storage_options = context.storage
        self._is_durable = context.durability == "full"
        self._registry = registry
        self.saves = BackgroundSaves()
        self.hints: set[str] = set()

    @cached_property
    def registry(self) -> Plugins:
        """The plugins in use."""
        return self._registry or installed_plugins().with_plugins(self._plugins.extra, self._plugins.handlers)

    @cached_property
    def io_threads(self) -> IOThreads:
        """Threads that move bytes."""
        return IOThreads(self._io.threads)

    @cached_property
    def storages(self) -> Storages:
        """The plugins and options with which storages are opened."""
        support = StorageSupport(self._io.without_conditions)
        return Storages(self.registry, self._storage_options, self._is_durable, support)

    @cached_property
    def staging(self) -> StagingPool:
        """Memory that background saves copy into."""
        return StagingPool()

    @cached_property
    def parsed_roots(self) -> ParsedRoots[StoredFormat]:
        """The parsed roots of the most recently opened checkpoints, with their layouts and cached indexes."""
        from ckptcore.commit.stored_root import ParsedRoots  # only `ckptcore.open` needs it

        return ParsedRoots()

    @cached_property
    def composite_save_ids(self) -> dict[bytes, str | None]:
        """The save ids of the most recently opened composites, by the digest of the root."""
        return {}

    def exchange_key(self, location: object, *, job: Coordinator | None = None) -> str:
        """Return a key for the exchanges of an operation.

        Ranks get equal keys if they have begun the same number of operations at this location.

        Args:
            location: the location, with the kind of the operation.
            job: the job of the exchanges; None: the current job of this process.
        """
        coordinator = self._job.coordinator
        if coordinator is None:
            joined = self.registry.coordinator() if job is None else job
            coordinator = joined if isinstance(joined, Rejoinable) else None
        return exchange_counts().key(coordinator, str(location))

    def job(self) -> Coordinator:
        """Return the coordinator of the job."""
        return self._job.coordinator or self.registry.coordinator()

    def show_progress(
        self, progress: bool | ProgressCallback, title: str
    ) -> AbstractContextManager[ProgressCallback | None]:
        """Return a context manager that yields the progress function. See `ckptcore.progress.show_progress`."""
        return show_progress(progress, title, rank=self.job().rank if progress is True else 0)

    def workers(self) -> Executor | None:
        """Return the workers that hold the elements of leaves; None if this process controls no workers.

        Raises:
            ValueError: the Context has an executor, and this process is one of several of a job.
        """
        size = self.job().size
        executor = self._job.executor
        if executor is None:
            return self.registry.executor() if size == 1 else None
        if size > 1:
            raise ValueError(
                f"JobOptions(executor={type(executor).__name__}(...)) is for a single controller, and this process is "
                f"one of {size} of a job: leave the executor out, or give the Context of the controller a coordinator "
                "of one process"
            )
        return executor


def runtime_of(context: Context) -> Runtime:
    """Return the Runtime of a Context. The first call creates it; it lives as long as the Context. Thread-safe."""
    runtime: Runtime | None = context.__dict__.get(_ATTRIBUTE)
    if runtime is None:
        # `setdefault` is atomic, so concurrent first calls get the same Runtime.
        runtime = context.__dict__.setdefault(_ATTRIBUTE, Runtime(context))
    return runtime


def with_registry(context: Context, registry: Plugins) -> Context:
    """Return a copy of a Context that uses the given plugins, with a new Runtime."""
    own = replace(context)
    own.__dict__[_ATTRIBUTE] = Runtime(own, registry)
    return own


def refuse_in_signal_handler(call: str) -> None:
    """Refuse a call from a signal handler that interrupted another call of ckptcore, in the main thread.

    The interrupted call may hold locks, for which this call would wait forever. It may be importing modules, which this
    call would see unfinished. It may also be in an exchange with other processes.

    Args:
        call: the call, for the error.

    Raises:
        CheckpointError: with the remedy. If the handler does not catch the error, it also ends the interrupted call.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # Python runs signal handlers in the main thread only
    between: list[FrameType] = []  # frames of other code, between frames of ckptcore
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] != __name__.partition(".")[0]:
            between.append(frame)
        elif between:
            for other in between:
                code, count = other.f_code, other.f_code.co_argcount
                values = [other.f_locals.get(name) for name in code.co_varnames[:count]]
                if code.co_flags & _VARIABLE_ARGUMENTS:
                    values += other.f_locals.get(code.co_varnames[count + code.co_kwonlyargcount], ())
                # Python passes a handler the signal number and the interrupted frame, which is the caller of its frame.
                # So a frame without its caller among its arguments is no handler, but code that ckptcore called back.
                if id(other.f_back) not in map(id, values):
                    continue
                raise CheckpointError(
                    f"{call}: called by a signal handler that interrupted another call of ckptcore, which may hold "
                    "locks or import modules. Set a flag in the handler and save at the end of the step, or use "
                    "Checkpointer(save_policy=...) with PreemptionCheckpointing(). Nothing was done by this call"
                )
            between.clear()
        frame = frame.f_back
