"""Reports of stalls: which reports belong together, who holds up the others, and reports of hostile files."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import pytest
from ckptcore_recovery.watchdog import StallReport, read_incidents
from ckptcore_recovery.watchdog.command import stalls_command
from ckptcore_recovery.watchdog.detection import Stall
from ckptcore_recovery.watchdog.reports import REPORT_DIRECTORY, write_report
from ckptcore_recovery.watchdog.stacks import frames_of
from ckptcore_recovery.watchdog.utilisation import Utilisation, UtilisationSampler
from ckptcore_testing.commands import runner

from ckptcore.builtin.local import open_local
from ckptcore.protocols import StorageOptions

ALL_REDUCE: Final = "/lib/torch/distributed/distributed_c10d.py:10 in all_reduce"


def report(rank: int, *, what: str = "step", phase: str = "step", step: int = 7, frame: str = "") -> StallReport:
    """Return the report of a rank."""
    return StallReport(
        stall=Stall(what, phase, step, "", 1_796_000_000.0, 70.5, 60.0, 1 << 40),
        rank=rank,
        host=f"host-{rank}",
        pid=100,
        state="running",
        frames=(frame,) if frame else (),
        utilisation=Utilisation(2.0, 0.0, None),
    )


def write(directory: Path, *reports: StallReport) -> None:
    """Write reports, in this order of their names."""
    for number, each in enumerate(reports):
        (name,) = [write_report(open_local(str(directory), StorageOptions()), each, "stacks").removesuffix(".txt")]
        for suffix in (".json", ".txt"):
            path = directory / f"{name}{suffix}"
            path.rename(path.with_name(f"{number:03d}{suffix}"))


def suspects(directory: Path, *reports: StallReport) -> list[int]:
    """Return the suspects of reports about one step."""
    write(directory, *reports)
    (incident,) = read_incidents(directory)
    return list(incident.suspects)


def test_reports_come_back_and_their_stacks_begin_with_their_text(tmp_path: Path) -> None:
    write(tmp_path, report(0, frame="a.py:1 in f"))
    (incident,) = read_incidents(tmp_path)
    assert incident.reports == [report(0, frame="a.py:1 in f")]
    (stacks,) = (tmp_path / REPORT_DIRECTORY).glob("*.txt")
    assert stacks.read_text() == (
        "rank 0 (process 100 on host-0): step 7 takes longer than 60 s, since 2026-11-30 00:53:20 UTC; in a.py:1 in f; "
        "the processors of the host are idle\n\nstacks"
    )


def test_the_frame_of_the_program_comes_back_below_many_of_libraries(tmp_path: Path) -> None:
    frames = (*[f"/usr/lib/python3.11/http/client.py:{line} in send" for line in range(99)], "/train.py:5 in main")
    write(tmp_path, replace(report(0), frames=frames))
    (incident,) = read_incidents(tmp_path)
    assert [stalled.frame for stalled in incident.reports] == ["/train.py:5 in main"]


def test_the_rank_that_does_not_wait_is_suspected(tmp_path: Path) -> None:
    waiting = [report(rank, frame=ALL_REDUCE) for rank in (0, 1, 3)]
    assert suspects(tmp_path, report(2, frame="/train.py:5 in read"), *waiting) == [2]


def test_the_rank_whose_phase_is_no_exchange_is_suspected(tmp_path: Path) -> None:
    waiting = [report(rank, what="save", phase="exchange") for rank in range(3)]
    assert suspects(tmp_path, *waiting, report(3, what="save", phase="write")) == [3]


def test_the_frame_that_fewest_ranks_are_in_is_suspected(tmp_path: Path) -> None:
    waiting = [report(rank, frame=f"/train.py:{rank} in backward") for rank in range(3)]
    assert suspects(tmp_path, *waiting, report(3, frame="/train.py:9 in read")) == [3]


_LIBRARY: Final = "/usr/lib/python3.11/threading.py:320 in wait"
_JAX: Final = "/v/lib/python3.11/site-packages/jax/_src/array.py:600 in _value"


@pytest.mark.parametrize(
    ("frames", "number", "is_wait"),
    [
        ([_LIBRARY, "/a/ckptcore/job/gathering.py:9 in gather", "/train.py:5 in main"], 1, True),
        ([_JAX, _LIBRARY, "/a/jax/experimental/multihost_utils.py:9 in sync", "/train.py:5 in main"], 2, True),
        ([ALL_REDUCE, "/train.py:5 in main"], 0, True),
        ([_LIBRARY, "/train.py:5 in read", "/a/torch/distributed/fsdp/api.py:9 in forward"], 1, False),
        ([_LIBRARY, _LIBRARY], 0, False),
    ],
)
def test_the_frame_is_that_of_no_library_internals(frames: list[str], number: int, is_wait: bool) -> None:
    stalled = replace(report(0), frames=tuple(frames))
    assert (stalled.frame, stalled.is_wait) == (frames[number], is_wait)


def test_no_rank_is_suspected_if_all_wait(tmp_path: Path) -> None:
    assert suspects(tmp_path, report(0, frame=ALL_REDUCE), report(1, frame=ALL_REDUCE)) == []


def test_a_rank_that_reports_the_same_step_again_was_restarted(tmp_path: Path) -> None:
    write(tmp_path, report(1), report(0), report(0, step=8), report(0), report(1), report(1, step=8))
    ranks = [
        ([each.rank for each in incident.reports], incident.reports[0].stall.step)
        for incident in read_incidents(tmp_path)
    ]
    assert ranks == [([0, 1], 7), ([0, 1], 8), ([0, 1], 7)]


@pytest.mark.parametrize(
    "change",
    [
        {"rank": -1}, {"rank": True}, {"rank": 1 << 70}, {"host": 3}, {"state": "asleep"},
        {"frames": "abc"}, {"frames": [1]}, {"utilisation": {}}, {"stall": []}, {"stall": None},
        {"utilisation": {"processors": "high", "process": None, "gpus": None}},
        {"stall": {**asdict(report(0).stall), "step": 1.5}}, {"stall": {**asdict(report(0).stall), "began": 1e300}},
    ],
)  # fmt: skip
def test_invalid_reports_are_passed_over(tmp_path: Path, change: dict[str, Any]) -> None:
    write(tmp_path, report(0), report(1))
    damaged = tmp_path / REPORT_DIRECTORY / "000.json"
    damaged.write_text(json.dumps({**json.loads(damaged.read_text()), **change}))
    (tmp_path / REPORT_DIRECTORY / "002.json").write_text("[" * 100_000)
    (incident,) = read_incidents(tmp_path)
    assert [each.rank for each in incident.reports] == [1]


def test_what_cannot_be_printed_is_escaped(tmp_path: Path) -> None:
    write(tmp_path, report(0, what="pause", phase="test\nof \udcff", frame="/a\x1b[2J.py:1 in f"))
    (incident,) = read_incidents(tmp_path)
    assert incident.reports[0].stall.phase == r"test\nof \udcff"
    assert incident.reports[0].frames == (r"/a\x1b[2J.py:1 in f",)


def test_the_command_shows_who_holds_up_a_run(tmp_path: Path) -> None:
    shown = runner().invoke(stalls_command, [str(tmp_path)])
    assert (shown.exit_code, shown.stdout) == (0, "No stall was reported.\n")
    write(tmp_path, report(0, frame=ALL_REDUCE), report(1, frame="/train.py:5 in read"))
    shown = runner().invoke(stalls_command, [str(tmp_path)])
    heading, _, *rows = shown.stdout.splitlines()
    assert heading == "step 7: held up by rank 1"
    assert [row.split()[:2] for row in rows] == [["0", "host-0"], ["1", "host-1"]]
    document = json.loads(runner().invoke(stalls_command, [str(tmp_path), "--json"]).stdout)
    assert document["incidents"][0]["suspects"] == [1] and len(document["incidents"][0]["reports"]) == 2


def test_the_frames_of_a_thread_are_found_in_a_dump() -> None:
    dump = """\
Thread 0x00000000000000ab (most recent call first):
  File "/x.py", line 1 in a b
  File "/x.py", line ??? in c

Current thread 0x00000000000000ac [python] (most recent call first):
  File "/a "b".py", line 12 in <module>
"""
    assert frames_of(dump, 0xAB) == ["/x.py:1 in a b", "/x.py:??? in c"]
    assert frames_of(dump, 0xAC) == ['/a "b".py:12 in <module>']
    assert frames_of(dump, 0xAD) == frames_of("", 0xAB) == []


def test_utilisation_is_that_since_the_stall_began(tmp_path: Path) -> None:
    (tmp_path / "5").mkdir()
    sampler = UtilisationSampler(5, tmp_path)
    sampler.sample(0.0)  # without files
    assert sampler.since(0.0) == Utilisation()
    for now, (user, idle, own) in enumerate([(0, 0, 0), (1000, 0, 900), (1020, 1980, 920)]):
        (tmp_path / "stat").write_text(f"cpu  {user} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1\n")
        (tmp_path / "5/stat").write_text(f"5 (a b) c) R {' 0' * 10} {own} 0 0\n")
        sampler.sample(float(now))
    assert sampler.since(1.0).processors == pytest.approx(1.0)
    assert sampler.since(1.0).idle == ["processors"]
    assert sampler.since(0.0).processors == pytest.approx(34.0)
    assert sampler.since(0.0).idle == []
    assert replace(sampler.since(5.0), gpus=None) == Utilisation()


def test_gpus_are_asked_through_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '3\\n1\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    sampler = UtilisationSampler(5, tmp_path)
    sampler.ask_gpus(1.0)
    assert sampler._asking is not None
    sampler._asking.join()
    assert sampler.since(1.0) == Utilisation(gpus=3.0) and sampler.since(1.0).idle == ["GPUs"]
    program.write_text("#!/bin/sh\necho '[N/A]'\n")  # a GPU that does not tell
    sampler.ask_gpus(2.0)
    sampler._asking.join()
    assert sampler.since(2.0) == Utilisation()
