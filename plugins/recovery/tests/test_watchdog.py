"""The watchdog of real processes: it reports what stalls, alerts, asks for a save, and ends the process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Final

import pytest
from ckptcore_recovery.watchdog import (
    AskForSave,
    Command,
    EndJob,
    Incident,
    Learnt,
    Log,
    RunLog,
    StallReport,
    Watchdog,
    Webhook,
    read_incidents,
)
from ckptcore_recovery.watchdog.policy import Action, policy_to_json
from ckptcore_recovery.watchdog.run_log import read_run_log

import ckptcore
from ckptcore.builtin.local import open_local
from ckptcore.context import PluginOptions
from ckptcore.errors import InvalidLocationError, UnknownPluginError
from plugins.recovery.tests.stalled_training import IN_PHASE, STEP

pytestmark = pytest.mark.system

_PATIENCE_SECONDS: Final = 120.0

ENDED: Final = {
    "lock": EndJob(grace=3600.0),
    "interpreter lock": EndJob(grace=3600.0),
    "stopped": EndJob(grace=0.5),
    "leaves threads": EndJob(grace=2.0),
}
"""Ways to stall of processes that are ended. The standard error of the first one has no reader."""


class StalledTraining:
    """A process of `stalled_training`.

    Attributes:
        directory: the directory of its run.
        process: the process.
        monitor: the pid of its monitor.
    """

    def __init__(self, name: str, directory: Path, policy: Sequence[Action] = (), *, stderr: int | None = None) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self._errors = directory / "stderr"
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "plugins.recovery.tests.stalled_training", name, str(directory)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr or errors, text=True, bufsize=1,
            )  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(policy_to_json(policy)) + "\n")

    @property
    def monitor(self) -> int:
        """The pid of the monitor. Waits for the line that has it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.errors
        return int(line)

    @property
    def errors(self) -> str:
        """The standard error of the process and of its monitor."""
        return self._errors.read_text()

    def report(self, what: str = "step", step: int | None = STEP) -> StallReport:
        """Wait for the report of a step or an operation. On a busy machine, others may take too long as well."""

        def reports() -> list[StallReport]:
            every = [report for incident in read_incidents(self.directory) for report in incident.reports]
            return [report for report in every if (report.stall.what, report.stall.step) == (what, step)]

        wait_until(reports, self)
        return reports()[0]

    def stacks(self) -> str:
        """Return the stacks that were written with the first report."""
        return min((self.directory / ".ckptcore/stalls").glob("*.txt")).read_text()

    def wait(self) -> int:
        """Wait until the process has ended. Return its status."""
        return self.process.wait(_PATIENCE_SECONDS)

    def close(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.communicate()


def wait_until(condition: Any, training: StalledTraining) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, training.errors
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, StalledTraining]]:
    """Return processes that need no test to go on. They run at the same time."""
    in_step = ["interpreter lock", "lock", "pipe", "stopped", "killed"]
    names = [*in_step, *IN_PHASE, "forks", "many steps", "without monitor"]
    policies: dict[str, Action] = {
        **dict.fromkeys(names, Log()),
        "asked": AskForSave(),
        **{f"ended: {name}": action for name, action in ENDED.items()},
    }
    with contextlib.ExitStack() as stack:
        started = {}
        for name, action in policies.items():
            stderr = stack.enter_context(_full_pipe()) if name == "ended: lock" else None
            directory = tmp_path_factory.mktemp("run") / "run"
            started[name] = StalledTraining(name.removeprefix("ended: "), directory, [action], stderr=stderr)
            stack.callback(started[name].close)
        yield started


@contextlib.contextmanager
def _full_pipe() -> Iterator[int]:
    """Return the descriptor of a pipe that is full and has no reader."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    yield writer
    os.close(writer)
    os.close(reader)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Return a function that starts a process. It is killed at the end."""
    with contextlib.ExitStack() as stack:

        def start_training(name: str, *policy: Action) -> StalledTraining:
            training = StalledTraining(name, tmp_path / f"run of {name}", policy)
            stack.callback(training.close)
            return training

        yield start_training


@pytest.mark.parametrize(
    ("name", "state", "function"),
    [
        ("interpreter lock", "blocked", "hold_interpreter_lock"),
        ("lock", "running", "wait_for_lock"),
        ("pipe", "running", "fill_pipe"),
        ("stopped", "stopped", None),
    ],
)
def test_a_stalled_step_is_reported_with_its_stacks(
    trainings: dict[str, StalledTraining], name: str, state: str, function: str | None
) -> None:
    report = trainings[name].report()
    stall = report.stall
    assert (stall.what, stall.step, stall.bound, report.rank, report.state) == ("step", STEP, 0.5, 0, state)
    assert report.pid == trainings[name].process.pid and stall.seconds > 0.5
    assert not report.is_wait
    if function is None:
        assert report.frames == ()
    else:
        assert report.frames[0].endswith(f" in {function}")
        assert f" in {function}\n" in trainings[name].stacks() and " in _beat\n" in trainings[name].stacks()
    text = f"step {STEP} takes longer than 0.5 s"
    wait_until(lambda: text in trainings[name].errors, trainings[name])


@pytest.mark.skipif(not Path(sys.executable).with_name("py-spy").exists(), reason="py-spy is not installed")
@pytest.mark.parametrize("name", ["interpreter lock", "stopped"])
def test_py_spy_shows_the_stacks_too(trainings: dict[str, StalledTraining], name: str) -> None:
    trainings[name].report()
    _, _, spied = trainings[name].stacks().partition("py-spy:\n")
    if spied.startswith("py-spy failed: ") and "permission" in spied.lower():
        pytest.skip(f"the kernel does not let a process read its sibling: {spied:.200}")
    function = {"interpreter lock": "hold_interpreter_lock", "stopped": "stop"}[name]
    assert f" {function} (" in spied


@pytest.mark.parametrize(
    ("name", "operation", "phase"),
    [
        ("describe", "save", "describe"),
        ("save", "save", "write"),
        ("load", "load", "read"),
        ("upload", "upload", "upload"),
        ("delete", "delete", "clean"),
    ],
)
def test_a_stalled_operation_is_reported_with_its_phase(
    trainings: dict[str, StalledTraining], name: str, operation: str, phase: str
) -> None:
    report = trainings[name].report(operation, None if phase == "clean" else STEP)
    assert report.stall.phase == phase
    assert report.frames[0].endswith(" in wait_for_lock")
    assert str(trainings[name].directory) in report.stall.location


def test_a_killed_process_has_failed_and_its_monitor_ends(start: Any) -> None:
    training = start("test")
    monitor = training.monitor
    training.process.kill()
    wait_until(lambda: not _runs(monitor), training)
    (incarnation,) = read_run_log(training.directory)
    assert incarnation.outcome == "failed" and incarnation.duration > 0


def test_a_process_that_is_killed_at_once_has_a_log(trainings: dict[str, StalledTraining]) -> None:
    training = trainings["killed"]
    assert training.wait() == -signal.SIGKILL
    wait_until(lambda: [each.outcome for each in read_run_log(training.directory)] == ["failed"], training)


def test_a_stall_that_ends_is_in_the_log_of_the_run_and_has_no_further_actions(start: Any) -> None:
    training = start("test", EndJob(after=3600.0), Log())
    wait_until(lambda: f"step {STEP} takes longer than 0.5 s" in training.errors, training)
    monitor = training.monitor
    os.kill(monitor, signal.SIGTERM)  # of a launcher that signals all processes
    training.process.stdin.write("\n")
    assert training.wait() == 0
    assert not _runs(monitor)
    (incarnation,) = read_run_log(training.directory)
    assert incarnation.outcome == "finished"
    assert sum(period.steps for period in incarnation.periods) == 1
    (note,) = [note for note in incarnation.notes if note.kind == "stall"]
    assert note.step == STEP and note.text is not None and "takes longer than 0.5 s" in note.text


def test_a_forked_child_changes_nothing(trainings: dict[str, StalledTraining]) -> None:
    training = trainings["forks"]
    assert training.wait() == 0
    (incarnation,) = read_run_log(training.directory)
    assert incarnation.outcome == "finished"
    assert [(period.first, period.last) for period in incarnation.periods if period.steps] == [(STEP, STEP + 1)]
    (of_child,) = read_run_log(training.directory / "of-child")
    assert of_child.outcome == "finished"


# --- policies ---------------------------------------------------------------------------------------------------------


class _Hook(BaseHTTPRequestHandler):
    """Keeps what is posted. Refuses some paths."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server: Any = self.server
        self.send_response({"refused": 403, "redirected": 302}.get(self.path.rpartition("/")[2], 200))
        self.send_header("Location", "/secret-path/other")
        self.end_headers()
        server.posted.append((self.path, json.loads(body)))

    def do_GET(self) -> None:
        """Of a redirect that is followed."""
        server: Any = self.server
        self.send_response(200)
        self.end_headers()
        server.posted.append((self.path, None))

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""


@pytest.fixture
def hook() -> Iterator[Any]:
    """Return a server for webhooks."""
    server: Any = HTTPServer(("127.0.0.1", 0), _Hook)
    server.posted = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_webhook_and_a_command_get_the_report_and_errors_are_logged_without_secrets(
    start: Any, hook: Any, tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{hook.server_port}"
    training = start(
        "lock",
        Webhook(f"{url}/secret-path"),
        Webhook(f"{url}/secret-path/refused"),
        Webhook(f"{url}/secret-path/redirected"),
        Webhook("http://127.0.0.1:1/secret-path"),
        Command(["sh", "-c", f"cat > {tmp_path}/new && mv {tmp_path}/new {tmp_path}/report"]),
        Command(["/no/such/program", "secret-path"]),
        Command(["false", "secret-path"]),
    )
    messages = [
        "the webhook at 127.0.0.1: status 403", "the webhook at 127.0.0.1: status 302",
        "to the webhook at 127.0.0.1: ConnectionRefusedError",
        "'/no/such/program' about a stall failed: No such file", "'false' about a stall ended with the status 1",
    ]  # fmt: skip
    wait_until(lambda: all(message in training.errors for message in messages), training)
    wait_until(lambda: len(hook.posted) == 3 and (tmp_path / "report").exists(), training)
    assert "secret-path" not in training.errors
    assert "secret" not in repr(Webhook("https://hooks.example/secret"))
    assert {path for path, _ in hook.posted} == {"/secret-path", "/secret-path/refused", "/secret-path/redirected"}
    posted = hook.posted[0][1]
    assert posted == json.loads((tmp_path / "report").read_text())
    assert f"step {STEP} takes longer than 0.5 s" in posted["text"]
    assert posted["report"]["stall"]["step"] == STEP and posted["report"]["frames"][0].endswith("in wait_for_lock")


def test_a_save_is_requested_from_a_slow_job(trainings: dict[str, StalledTraining]) -> None:
    training = trainings["asked"]
    assert training.wait() == 0, training.errors
    assert ckptcore.CheckpointReader(f"{training.directory}/steps").steps == (STEP + 1,)


@pytest.mark.parametrize("name", ENDED)
def test_a_stalled_process_is_ended(trainings: dict[str, StalledTraining], name: str) -> None:
    training = trainings[f"ended: {name}"]
    # The default handler of SIGTERM ends a process, unless it is stopped.
    is_killed = name in ("stopped", "leaves threads")
    assert training.wait() == (-signal.SIGKILL if is_killed else -signal.SIGTERM)
    if name != "lock":
        text = "the process is ended, so that the launcher starts the job again"
        wait_until(lambda: text in training.errors, training)
    wait_until(lambda: [each.outcome for each in read_run_log(training.directory)] == ["failed"], training)


# --- the channel ------------------------------------------------------------------------------------------------------


def test_training_goes_on_while_the_monitor_is_stopped_and_lost_messages_are_made_up(
    trainings: dict[str, StalledTraining],
) -> None:
    training = trainings["many steps"]
    assert training.report(step=5000).frames[0].endswith(" in wait_for_lock")
    assert ckptcore.CheckpointReader(f"{training.directory}/steps").latest == 4000


@pytest.mark.slow
def test_a_suspended_machine_raises_no_alarm(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEP_BOUND", "5")
    training = start("steps")
    monitor = training.monitor
    for number in (signal.SIGSTOP, signal.SIGCONT):
        os.kill(monitor, number)
        os.kill(training.process.pid, number)
        time.sleep(15)
    (training.directory / "enough").touch()
    assert training.wait() == 0
    assert list(read_incidents(training.directory)) == []
    assert sum(period.steps for period in read_run_log(training.directory)[0].periods) > 50


def test_training_goes_on_without_a_monitor(trainings: dict[str, StalledTraining]) -> None:
    training = trainings["without monitor"]
    assert training.wait() == 0, training.errors
    assert ckptcore.verify(f"{training.directory}/state").ok
    assert training.errors.count("the monitor of the watchdog has ended; training continues without it") == 1


def test_a_monitor_imports_no_framework() -> None:
    code = "import sys, ckptcore_recovery.watchdog.monitor; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "ckptcore_recovery.watchdog.monitor" in modules
    assert not {"torch", "jax", "tensorflow", "fsspec", "obstore"} & {name.partition(".")[0] for name in modules}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"policy": ["log"]}, TypeError),
        ({"policy": [EndJob(after=-1)]}, ValueError),
        ({"policy": [Command(["x" * (1 << 17)])]}, ValueError),
        ({"bounds": {"steps": 3.0}}, ValueError),
        ({"bounds": {"step": 0}}, ValueError),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: Any, error: type[Exception]) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(error):
        Watchdog(tmp_path, **options)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_process_has_one_watchdog_at_a_time(tmp_path: Path) -> None:
    for _ in range(2):
        with Watchdog(tmp_path), pytest.raises(RuntimeError, match="another Watchdog; close it first"):
            Watchdog(tmp_path)
    assert len(read_run_log(tmp_path)) == 2


def test_wrong_arguments_of_options_are_refused() -> None:
    with pytest.raises(ValueError, match="http"):
        Webhook("ftp://example.org")
    with pytest.raises(ValueError, match="sequence"):
        Command("rm -r")
    with pytest.raises(ValueError, match="factor"):
        Learnt(60.0, factor=0.5)
    with pytest.raises(InvalidLocationError, match="memory of this process"):
        Watchdog("memory://run")


class _Storage:
    """A plugin with a storage that only this process knows."""

    @ckptcore.hookimpl
    def ckpt_storages(self) -> dict[str, Any]:
        return {"mine": open_local}


def test_a_storage_that_the_monitor_does_not_know_is_refused() -> None:
    context = ckptcore.Context(plugins=PluginOptions(extra=(_Storage(),)))
    with pytest.raises(UnknownPluginError, match="mine"):
        Watchdog("mine://run", context=context)


def test_steps_that_no_checkpoint_can_have_are_refused(tmp_path: Path) -> None:
    with Watchdog(tmp_path) as watchdog, RunLog(tmp_path) as log:
        for step, error in ((-1, ValueError), (1 << 63, ValueError), (1.5, TypeError)):
            with pytest.raises(error):
                watchdog.step(step)  # type: ignore[arg-type]
            with pytest.raises(error):
                log.step(step)  # type: ignore[arg-type]


def test_suspects_are_the_ranks_that_do_not_wait(trainings: dict[str, StalledTraining]) -> None:
    report = trainings["lock"].report()
    assert Incident([report]).suspects == [0]
