"""Monitor: the process that watches a training process, and acts when something takes too long.

`Watchdog` starts it as ``python -m ckptcore_recovery.watchdog.monitor PID CHANNEL STACKS``: the process to watch, and
the inherited descriptors of the channel and of the file with stacks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import logging.handlers
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ckptcore.commit.location import open_directory
from ckptcore.context import Context
from ckptcore.errors import CheckpointError
from ckptcore.events import Event, logger_named
from ckptcore.protocols import StorageBackend
from ckptcore.runtime import runtime_of
from ckptcore_recovery.watchdog.bounds import Bound, Kind, bounds_from_json, shortest_bound
from ckptcore_recovery.watchdog.detection import Detector, RunningPause, RunningPhase, RunningStep, Stall
from ckptcore_recovery.watchdog.policy import (
    Action,
    AskForSave,
    Command,
    EndJob,
    Log,
    Webhook,
    policy_from_json,
    post,
    run_command,
)
from ckptcore_recovery.watchdog.reports import ProcessState, StallReport, write_report
from ckptcore_recovery.watchdog.run_log import Outcome
from ckptcore_recovery.watchdog.run_log_writer import RunLog
from ckptcore_recovery.watchdog.stacks import dump_by_py_spy, dump_by_signal, frames_of
from ckptcore_recovery.watchdog.utilisation import UtilisationSampler
from ckptcore_recovery.watchdog.watchdog import BEAT_SECONDS, MAX_MESSAGE_BYTES

_LOGGER: Final = logger_named("ckptcore.watchdog")

_MIN_TICK: Final = 0.02
_MAX_TICK: Final = 1.0
"""Seconds between two looks."""

_TICKS_THAT_COUNT: Final = 5
"""Maximum time between two looks that counts, in multiples of the intended time. The rest is a suspension."""

_LOOKS_PER_SAMPLE: Final = 5
_LOOKS_PER_GPU_SAMPLE: Final = 15
_SILENT_SECONDS: Final = 3 * BEAT_SECONDS
"""Time without a heartbeat that shows that no Python code runs in the process."""

_EXAMINE_SECONDS: Final = 30.0
"""Maximum time that actions wait for the stacks."""

_END_SECONDS: Final = 20.0
"""Time that actions have to end after the process."""

_PRINT_SECONDS: Final = 5.0
"""Time to print the last messages."""

_MAX_MESSAGES: Final = 1000
"""Maximum number of messages between two looks."""

_MAX_REPORTS: Final = 100
"""Maximum number of reports in the directory of the run, of one process. A process that stalls more often needs no
further report. The actions continue."""

_FRAMES: Final = 100
"""Maximum number of frames in a report, which is also the maximum of faulthandler. A client of HTTP can have 20 frames
below the frame of the program, which is the one to name."""


class WatchClock:
    """Seconds during which this process was running. Stands still while the machine, or this process, is suspended."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic, *, most: float) -> None:
        """Start at 0.

        Args:
            monotonic: a clock.
            most: the maximum seconds between two calls of `now` that count.
        """
        self._monotonic = monotonic
        self._most = most
        self._last = monotonic()
        self._now = 0.0

    def now(self) -> float:
        """Return the time."""
        last, self._last = self._last, self._monotonic()
        self._now += min(max(0.0, self._last - last), self._most)
        return self._now


class _Incident:
    """A stall, and what remains to be done about it.

    Attributes:
        report: its report; without frames until the process was examined.
        found: when it was found, by the clock of the monitor.
        actions: the actions that are not done yet, by the time when they are due.
        is_examined: True once the report is complete.
        is_logged: True once an action has logged it.
    """

    def __init__(self, report: StallReport, found: float, policy: Sequence[Action]) -> None:
        self.report = report
        self.found = found
        self.actions = list(policy)
        self.is_examined = False
        self.is_logged = False


class TrainingProcess:
    """The process that is watched.

    Attributes:
        pid: its number.
        descriptor: a file descriptor of the process, which becomes readable when it ends; None if it has ended.
        stacks: the file into which it writes its stacks.
    """

    def __init__(self, pid: int, stacks: int) -> None:
        """Open the process, which is the parent of this one."""
        self.pid = pid
        self.stacks = stacks
        self.descriptor: int | None = None
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            if os.getppid() == pid:  # otherwise the number may be that of another process
                self.descriptor = descriptor

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.descriptor is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.descriptor, number)

    def is_stopped(self) -> bool:
        """Return True if a signal has stopped the process."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
        except OSError:
            return False  # it has ended


class Monitor:
    """Watches a training process until it ends."""

    def __init__(self, process: TrainingProcess, channel: socket.socket, settings: Mapping[str, Any]) -> None:
        """Prepare.

        Args:
            process: the process.
            channel: the channel to it.
            settings: the first message of `Watchdog`.
        """
        self._process = process
        self._channel = channel
        self._rank: int = settings["rank"]
        self._policy = policy_from_json(settings["policy"])
        bounds: Mapping[Kind, Bound] = bounds_from_json(settings["bounds"])
        self._detector = Detector(bounds)
        self._tick = max(_MIN_TICK, min(_MAX_TICK, shortest_bound(bounds) / 10))
        self._clock = WatchClock(most=_TICKS_THAT_COUNT * self._tick)
        self._context = Context(storage=settings["storage"], durability="none")
        self._directory: str = settings["directory"]
        self._log: RunLog | None = None
        if self._rank == 0:
            self._log = RunLog(
                self._directory, processes=settings["processes"], began=settings["began"], context=self._context
            )
        self._utilisation = UtilisationSampler(process.pid)
        self._incidents: list[_Incident] = []
        self._looks = 0
        self._dumping = threading.Lock()
        self._reported = 0
        self._threads: list[threading.Thread] = []
        self._heard = 0.0
        self._kill_at: float | None = None
        self._outcome: Outcome | None = None
        self._ended_at: float | None = None

    # --- what the process does ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Watch the process until it ends or closes the watchdog, then end the log of the run, and the actions."""
        ready = select.poll()
        ready.register(self._channel, select.POLLIN)
        if self._process.descriptor is not None:
            ready.register(self._process.descriptor, select.POLLIN)
        next_look = 0.0
        while not self._is_over(ready.poll(self._tick * 1000)):
            if (now := self._clock.now()) >= next_look:
                next_look = now + self._tick
                self._look(now)
        if self._log is not None:
            # A process that `EndJob` ends has failed, even if it leaves its loop without an error.
            outcome = "failed" if self._kill_at is not None or self._outcome is None else self._outcome
            self._log.close(outcome, at=self._ended_at)
        self._kill_if_it_stays()
        deadline = time.monotonic() + _END_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _kill_if_it_stays(self) -> None:
        """Wait until a process that `EndJob` ends has ended, if it closed the watchdog. Kill it after the grace."""
        if self._kill_at is None or self._process.descriptor is None:
            return
        ended = select.poll()
        ended.register(self._process.descriptor, select.POLLIN)
        while not ended.poll(self._tick * 1000):
            if self._clock.now() >= self._kill_at:
                self._process.send(signal.SIGKILL)

    def _is_over(self, ready: list[tuple[int, int]]) -> bool:
        """Handle the messages that have arrived. Return True if the process has ended, or has closed the watchdog."""
        if not ready:
            return False
        for _ in range(_MAX_MESSAGES):  # a process that has ended may have left messages
            try:
                data = self._channel.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return any(descriptor == self._process.descriptor for descriptor, _ in ready)
            except ConnectionResetError:  # the process ended without reading what it was sent
                return True
            if not data:
                return True
            self._handle(json.loads(data), self._clock.now())
        return False

    def _handle(self, message: Mapping[str, Any], now: float) -> None:
        detector, at, self._heard = self._detector, message["at"], now
        if "step" in message:
            step = RunningStep(*message["step"])
            detector.step(step, now)
            if self._log is not None:
                self._log.step(step.number, at=at)
        elif "began" in message:
            detector.begin(RunningPhase(*message["began"]), now)
            if self._log is not None:
                self._log.began(Event(**message["event"]), at=at)
        elif "ended" in message:
            operation_id, phase, began = message["ended"]
            detector.end((operation_id, phase, began), now)
            if self._log is not None:
                self._log(Event(**message["event"]), at=at)
        elif "pause" in message:
            detector.pause(RunningPause(*message["pause"]), now)
            if self._log is not None:
                self._log.end_step(at=at)
        elif "resume" in message:
            detector.resume(message["resume"], now)
        elif "running" in message:
            last, phases, pauses = message["running"]
            detector.correct(
                None if last is None else RunningStep(*last),
                [RunningPhase(*phase) for phase in phases],
                [RunningPause(*pause) for pause in pauses],
                now,
            )
        elif "outcome" in message:
            self._outcome, self._ended_at = message["outcome"], at

    # --- stalls -------------------------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """Look for stalls, and do what is due."""
        if self._looks % _LOOKS_PER_SAMPLE == 0:
            self._utilisation.sample(now)
        new, ended = self._detector.check(now)
        if self._looks % _LOOKS_PER_GPU_SAMPLE == 0 and self._detector.is_slow():
            self._utilisation.ask_gpus(now)
        self._looks += 1
        for stall in new:
            incident = _Incident(self._report(stall, now), now, self._policy)
            self._incidents.append(incident)
            if self._log is not None:
                self._log.note("stall", step=stall.step, seconds=stall.seconds, text=str(incident.report))
            self._start(self._examine, incident)
        for incident in [incident for incident in self._incidents if incident.report.stall in ended]:
            self._incidents.remove(incident)
            if incident.is_logged:
                self._write_log(incident.report, f"{incident.report.name} has gone on")
        for incident in self._incidents:
            if incident.is_examined or now - incident.found > _EXAMINE_SECONDS:
                while incident.actions and now - incident.found >= incident.actions[0].after:
                    self._perform(incident.actions.pop(0), incident, now)
        if self._kill_at is not None and now >= self._kill_at:
            self._process.send(signal.SIGKILL)

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads = [thread, *[other for other in self._threads if other.is_alive()]]
        thread.start()

    def _report(self, stall: Stall, now: float) -> StallReport:
        return StallReport(
            stall=stall,
            rank=self._rank,
            host=socket.gethostname(),
            pid=self._process.pid,
            state="running",
            frames=(),
            utilisation=self._utilisation.since(now - stall.seconds),
        )

    def _examine(self, incident: _Incident) -> None:
        """Dump the stacks, complete the report of a stall, and write both. Runs on a thread of its own."""
        dump, state = "", self._state(incident.found)
        if state != "stopped":  # it would write them once it goes on
            with self._dumping:
                dump = dump_by_signal(self._process.send, self._process.stacks)
        frames = tuple(frames_of(dump, incident.report.stall.thread)[:_FRAMES])
        incident.report = dataclasses.replace(incident.report, state=state, frames=frames)
        incident.is_examined = True
        with self._dumping:
            self._reported += 1
            if self._reported > _MAX_REPORTS:
                return
        spied = dump_by_py_spy(self._process.pid)
        stacks = [dump or "The process did not write its stacks.\n"]
        if spied is not None:
            stacks.append(f"py-spy:\n{spied}")
        try:
            write_report(self._store(), incident.report, "\n".join(stacks))
        except (CheckpointError, OSError) as error:
            _LOGGER.warning("the report of a stall cannot be written: %s\n%s", error, "\n".join(stacks))

    def _state(self, found: float) -> ProcessState:
        """Wait for a heartbeat, and return the state of the process.

        Args:
            found: when the stall was found, by the clock of the monitor.
        """
        deadline = time.monotonic() + _SILENT_SECONDS
        while self._heard <= found:
            if self._process.is_stopped():
                return "stopped"
            if time.monotonic() > deadline:
                return "blocked"
            time.sleep(_MIN_TICK)
        return "running"

    def _store(self) -> StorageBackend:
        return open_directory(self._directory, runtime_of(self._context).storages, to_write=True)

    def _perform(self, action: Action, incident: _Incident, now: float) -> None:
        report = incident.report
        match action:
            case Log():
                incident.is_logged = True
                self._write_log(report, str(report))
            case Webhook():
                self._start(post, action, report)
            case Command():
                self._start(run_command, action, report)
            case AskForSave():
                self._tell({"save": True})
            case EndJob():
                self._tell({"ending": True})
                self._process.send(signal.SIGTERM)
                _LOGGER.warning("%s; the process is ended, so that the launcher starts the job again", report)
                deadline = now + action.grace
                self._kill_at = deadline if self._kill_at is None else min(self._kill_at, deadline)

    def _write_log(self, report: StallReport, text: str) -> None:
        """Log in the training process if its interpreter runs, or else on the standard error that both share."""
        if report.state != "running" or not self._tell({"log": text}):
            _LOGGER.warning("%s", text)

    def _tell(self, message: Mapping[str, Any]) -> bool:
        """Send a message to the process. Return False if it does not take it."""
        try:
            self._channel.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True


@contextlib.contextmanager
def _printed_messages() -> Iterator[None]:
    """Print messages on a thread of its own: the standard error may be a full pipe."""
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    printer = logging.StreamHandler()
    printer.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[logging.handlers.QueueHandler(records)], format="%(message)s")
    listener = logging.handlers.QueueListener(records, printer)
    listener.start()
    try:
        yield
    finally:
        stopping = threading.Thread(target=listener.stop, daemon=True)
        stopping.start()
        stopping.join(_PRINT_SECONDS)


def main() -> None:
    """Watch the process of the command line."""
    # A launcher may signal all processes of a job. This one ends with the process that it watches. Handlers, and not
    # SIG_IGN: commands of the policy would inherit that.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)
    pid, channel, stacks = map(int, sys.argv[1:])
    process = TrainingProcess(pid, stacks)
    with _printed_messages(), socket.socket(fileno=channel) as connection:
        settings = json.loads(connection.recv(MAX_MESSAGE_BYTES))
        Monitor(process, connection, settings).run()


if __name__ == "__main__":
    main()
    os._exit(0)  # threads may wait for a storage or for the standard error, and Python would wait for them
