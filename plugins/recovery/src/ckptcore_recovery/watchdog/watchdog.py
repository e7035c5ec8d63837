"""Watchdog: tells a monitor, in a process of its own, what the training process does. Never waits for it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from ckptcore.commit.location import LocationLike, absolute_location, open_directory, shown_location
from ckptcore.context import Context, default_context
from ckptcore.errors import InvalidLocationError
from ckptcore.events import Event, logger_named
from ckptcore.io.threads import reset_in_children
from ckptcore.runtime import runtime_of
from ckptcore.training.path_directory import as_run_directory
from ckptcore.training.run_directory import RunDirectory
from ckptcore_recovery.watchdog.bounds import Bound, Kind, bounds_to_json, with_defaults
from ckptcore_recovery.watchdog.detection import RunningPause, RunningPhase, RunningStep
from ckptcore_recovery.watchdog.policy import Action, Log, check_policy, policy_to_json
from ckptcore_recovery.watchdog.run_log import Outcome, checked_step, outcome_of
from ckptcore_recovery.watchdog.stacks import no_stacks_on_signal, write_stacks_on_signal

BEAT_SECONDS: Final = 1.0
"""Time between two heartbeats."""

MAX_MESSAGE_BYTES: Final = 1 << 16
"""Maximum length of a message between a training process and its monitor."""

_MAX_RUNNING: Final = 100
"""Maximum number of phases, and of pauses, that a message has. If more run, the newest count."""

_SEND_SECONDS: Final = 5.0
_CLOSE_SECONDS: Final = 60.0
"""Longer than the monitor waits for a slow storage."""

_LOGGER: Final = logger_named("ckptcore.watchdog")


class Watchdog:
    """Finds what takes too long in this process of a job, and writes the log of the run. Thread-safe.

    Its monitor is a process of its own. So it works while this process is killed, stopped, or blocked in a call that
    holds the interpreter lock, and it ends with this process. Every process of a job creates a watchdog, once it has
    joined the job, passes it as an observer, and calls `step` at the beginning of each step. Close it, or use it as a
    context manager::

        with Watchdog("runs/1", policy=[Log(), EndJob(after=300)]) as watchdog:
            context = ckptcore.Context(observers=[watchdog])
            with ckptcore.Checkpointer("runs/1", context=context) as run:
                for step in range(...):
                    watchdog.step(step)
                    ...

    No method waits for the monitor, except `close`. If the monitor is slow or has failed, training continues. Children
    by fork are not watched.
    """

    def __init__(
        self,
        directory: LocationLike | RunDirectory,
        *,
        policy: Sequence[Action] = (Log(),),
        bounds: Mapping[Kind, Bound] | None = None,
        context: Context | None = None,
    ) -> None:
        """Start the monitor.

        Args:
            directory: the directory of the run, where the monitor writes reports, stacks and the log of the run.
            policy: what to do about a stall.
            bounds: maximum durations of steps and operations, in seconds or learnt; see `DEFAULT_BOUNDS`.
            context: the job, and options of the storage.

        Raises:
            InvalidLocationError: the directory is no path or URL, or only this process sees it.
            OSError: the monitor cannot be started.
            RuntimeError: this process has another watchdog.
            TypeError: the policy has something else than an action.
            UnknownPluginError: no plugin supports the scheme.
            ValueError: a bound or a time is out of range.
        """
        context = context or default_context()
        location = as_run_directory(directory).location
        address = absolute_location(location)
        if address.startswith("memory:"):
            raise InvalidLocationError(
                f"{shown_location(location)} is the memory of this process: give a directory that its monitor, another "
                "process, can write"
            )
        monitored = Context(storage=context.storage)  # the monitor has no plugins of this process
        open_directory(location, runtime_of(monitored).storages, to_write=True)  # refuses unknown schemes
        job = runtime_of(context).job()
        settings = {
            "directory": address,
            "storage": {scheme: dict(options) for scheme, options in context.storage.items()},
            "rank": job.rank,
            "processes": job.size,
            "policy": policy_to_json(check_policy(policy)),
            "bounds": bounds_to_json(with_defaults(bounds or {})),
            "began": time.monotonic(),
        }
        # Reentrant: a handler of a signal may begin a phase while this thread reports another one.
        self._lock = threading.RLock()
        self._step: RunningStep | None = None
        self._phases: dict[tuple[str, str, float], RunningPhase] = {}
        self._pauses: dict[int, RunningPause] = {}
        self._numbers = itertools.count()
        self._is_complete = True
        """False if the monitor missed a message. The next heartbeat tells it everything."""
        self._save_requested = False
        self._is_ending = False
        """True once the monitor ends this process."""
        self._last_message = threading.Event()
        """Set once the monitor has ended, or ends this process."""
        self._stacks = write_stacks_on_signal()
        self._channel: socket.socket | None = None
        try:
            self._channel, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with its_end:
                self._tell(settings)
                if not self._is_complete:
                    raise ValueError(f"Watchdog(policy=...): it has more than {MAX_MESSAGE_BYTES} bytes as JSON")
                descriptors = (its_end.fileno(), self._stacks)
                arguments = map(str, (os.getpid(), *descriptors))
                self._monitor = subprocess.Popen(
                    [sys.executable, "-m", "ckptcore_recovery.watchdog.monitor", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=descriptors,
                    start_new_session=True,  # launchers kill the session of a process
                )
        except BaseException:
            if self._channel is not None:
                self._channel.close()
            no_stacks_on_signal(self._stacks)
            raise
        reset_in_children(self)
        self._thread = threading.Thread(target=self._beat, args=(self._channel,), name="ckptcore-watchdog", daemon=True)
        self._thread.start()

    def reset_after_fork(self) -> None:
        """Do nothing in a forked child: the monitor watches the parent."""
        self._lock = threading.RLock()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
            no_stacks_on_signal(self._stacks)

    # --- what happens -------------------------------------------------------------------------------------------------

    def step(self, step: int) -> None:
        """Report that a step begins, and that the step before it has ended.

        Args:
            step: its number.
        """
        with self._lock:
            self._step = RunningStep(checked_step(step), time.time(), threading.get_ident())
            self._tell({"step": self._step})

    @contextlib.contextmanager
    def pause(self, name: str, *, bound: float | None = None) -> Iterator[None]:
        """Return a context manager in which the step does not age, for an evaluation or a compilation.

        Args:
            name: what happens meanwhile, for reports.
            bound: the maximum seconds of the pause; None: no bound.

        Raises:
            ValueError: the bound is not above 0.
        """
        if bound is not None and not bound > 0:
            raise ValueError(f"pause({name!r}, bound={bound!r}): expected seconds above 0, or None")
        pause = RunningPause(next(self._numbers), str(name)[:100], bound, time.time(), threading.get_ident())
        with self._lock:
            self._pauses[pause.number] = pause
            self._tell({"pause": pause})
        try:
            yield
        finally:
            with self._lock:
                del self._pauses[pause.number]
                self._tell({"resume": pause.number})

    def began(self, event: Event) -> None:
        """Report that a phase begins. See `ckptcore.events.BeginObserver`."""
        phase = RunningPhase(
            event.operation_id, event.operation, event.phase, event.began, event.step, event.location,
            threading.get_ident(),
        )  # fmt: skip
        with self._lock:
            while len(self._phases) >= _MAX_RUNNING:
                del self._phases[next(iter(self._phases))]
            self._phases[phase.key] = phase
            self._tell({"began": phase, "event": dataclasses.asdict(event)})

    def __call__(self, event: Event) -> None:
        """Report that a phase has ended. See `ckptcore.events.Observer`."""
        key = event.operation_id, event.phase, event.began
        with self._lock:
            self._phases.pop(key, None)
            self._tell({"ended": key, "event": dataclasses.asdict(event)})

    def save_requested(self, step: int) -> bool:
        """Return True once an `AskForSave` has asked for a last save. A ``preemption_notice`` of a `Checkpointer`."""
        return self._save_requested

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self, outcome: Outcome = "finished") -> None:
        """End the monitor. Waits up to a minute until it has written the log of the run. Further calls do nothing.

        If an `EndJob` ends this process, the monitor stays: it kills the process after the grace.

        Args:
            outcome: "finished" if the job ended as intended, or will continue later. "failed" if it must start again
                because of an error.
        """
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is None:
            return
        message = json.dumps({"outcome": outcome, "at": time.monotonic()}).encode()
        writable = select.poll()
        writable.register(channel, select.POLLOUT)
        with contextlib.suppress(OSError):  # the monitor has ended
            if writable.poll(_SEND_SECONDS * 1000):
                channel.send(message, socket.MSG_DONTWAIT)
            channel.shutdown(socket.SHUT_WR)
        has_ended = self._last_message.wait(_CLOSE_SECONDS)
        if self._is_ending:
            return
        try:
            self._monitor.wait(_CLOSE_SECONDS if has_ended else 0)
        except subprocess.TimeoutExpired:  # it may still send the signal
            _LOGGER.warning("the monitor of the watchdog has not ended after %.0f s", _CLOSE_SECONDS)
            return
        self._thread.join()
        channel.close()
        no_stacks_on_signal(self._stacks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the watchdog. See `outcome_of`."""
        self.close(outcome_of(error))

    # --- the monitor --------------------------------------------------------------------------------------------------

    def _tell(self, message: dict[str, Any]) -> None:
        """Send a message to the monitor, unless that would block. The caller has the lock, or is the only thread."""
        if self._channel is None:
            return
        data = json.dumps({**message, "at": time.monotonic()}).encode()
        try:
            if len(data) > MAX_MESSAGE_BYTES:
                self._is_complete = False
            else:
                self._channel.send(data, socket.MSG_DONTWAIT)
        except OSError:  # its buffer is full, or it has ended: `_beat` finds out
            self._is_complete = False

    def _beat(self, channel: socket.socket) -> None:
        """Send heartbeats, and receive what the monitor says, until it ends."""
        readable = select.poll()
        readable.register(channel, select.POLLIN)
        while True:
            if readable.poll(BEAT_SECONDS * 1000):
                try:
                    data = channel.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    continue
                except OSError:
                    data = b""
                if not data:
                    break
                self._obey(json.loads(data))
                continue
            with self._lock:
                if self._is_complete:
                    self._tell({})
                else:
                    self._is_complete = True
                    running = [*self._phases.values()], [*self._pauses.values()][-_MAX_RUNNING:]
                    self._tell({"running": [self._step, *running]})
        self._last_message.set()
        if self._channel is not None:
            _LOGGER.warning("the monitor of the watchdog has ended; training continues without it")

    def _obey(self, message: Mapping[str, Any]) -> None:
        if "log" in message:
            _LOGGER.warning("%s", message["log"])
        if "save" in message:
            self._save_requested = True
        if "ending" in message:
            self._is_ending = True
            self._last_message.set()
