"""Ray Train with our saves: a worker is killed during a save, and Ray restarts the job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from ckptcore_integrations import ray_train
from ckptcore_integrations.ray_train import checkpoint_location, save_and_report
from fsspec.implementations.dirfs import DirFileSystem
from pyarrow import fs
from ray.train import Checkpoint

import ckptcore

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[4]

PROGRAM = """
import json, os, signal, sys
from pathlib import Path
import ray
from ckptcore import Context
from ckptcore_integrations.ray_train import checkpoint_location
from tests.docs.pages import code_blocks

page, directory, fate = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
blocks = [block.code for block in code_blocks(page.read_text("utf-8")) if block.language == "python"]
scope = {"__name__": "guide"}
exec(compile(blocks[0], str(page), "exec"), scope)
train = scope["train"]

def worker(config):
    def kill(event):
        marker = directory / "killed"
        if event.phase == "write" and event.step is None and event.rank == 1 and fate == "killed":
            writes = directory / "writes"
            count = len(writes.read_bytes()) if writes.exists() else 0
            writes.write_bytes(b"x" * (count + 1))
            if count == 2 and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    train({**config, "context": Context(observers=[kill])})

ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
trainer = ray.train.torch.TorchTrainer(
    worker,
    train_loop_config={"steps": 5},
    scaling_config=ray.train.ScalingConfig(num_workers=2),
    run_config=ray.train.RunConfig(
        name="run",
        storage_path=str(directory),
        failure_config=ray.train.FailureConfig(max_failures=1),
        checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
    ),
)
result = trainer.fit()
print(json.dumps({"metrics": result.metrics, "location": checkpoint_location(result.checkpoint)}))
"""


GOING_BACK = """
import json, sys
import numpy as np
import ray
import ray.train.torch
from ckptcore_integrations.ray_train import checkpoint_location, save_and_report

def worker():
    for count, step in enumerate([1, 2, 3, 1, 2, 3, 4]):
        save_and_report(step, {"model": {"w": np.full(3, count)}}, {"count": count})

ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
result = ray.train.torch.TorchTrainer(
    worker,
    scaling_config=ray.train.ScalingConfig(num_workers=1),
    run_config=ray.train.RunConfig(
        name="run", storage_path=sys.argv[2], checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2)
    ),
).fit()
print(json.dumps([[checkpoint_location(found), metrics["count"]] for found, metrics in result.best_checkpoints]))
"""


REFUSED = """
import json, sys, threading
from pathlib import Path
import numpy as np
import ray
import ray.train.torch
from ckptcore.errors import CheckpointError
from ckptcore_integrations.ray_train import resume

directory = sys.argv[2]

def worker():
    state = {"model": {"w": np.ones(3)}, "loop": {"lock": threading.Lock(), "deep": [print]}}
    try:
        resume(state)
    except CheckpointError as error:
        Path(directory, f"message-{ray.train.get_context().get_world_rank()}").write_text(str(error))

ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
ray.train.torch.TorchTrainer(
    worker,
    scaling_config=ray.train.ScalingConfig(num_workers=2),
    run_config=ray.train.RunConfig(name="run", storage_path=directory),
).fit()
print(json.dumps([Path(directory, f"message-{rank}").read_text() for rank in range(2)]))
"""


def run(directory: Path, fate: str) -> dict[str, Any]:
    """Train, and return the last metrics and the location of the last checkpoint."""
    directory.mkdir()
    result: dict[str, Any] = run_program(PROGRAM, directory, fate)
    return result


def run_program(program: str, directory: Path, fate: str = "") -> Any:
    """Run a program in a process, and return the JSON that it prints."""
    page = ROOT / "docs/how-to/with-ray-train.md"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, "-c", program, str(page), str(directory), fate]
    done = subprocess.run(
        command, env=environment, cwd=directory, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", "whole")
    killed = run(tmp_path / "killed", "killed")
    assert (tmp_path / "killed" / "killed").exists()
    assert killed["metrics"] == whole["metrics"]
    first, second = [ckptcore.load(f"{found['location']}/model") for found in (whole, killed)]
    assert all((first[name] == second[name]).all() for name in first)
    assert Path(killed["location"]).name == "checkpoint_000005"
    assert ckptcore.verify(killed["location"]).ok
    assert sorted(path.name for path in Path(killed["location"]).parent.glob("checkpoint_0*")) == [
        "checkpoint_000004",
        "checkpoint_000005",
    ]


def test_steps_that_are_reported_again_are_not_deleted(tmp_path: Path) -> None:
    """Ray Train deletes the directories of old reports. The directory of a new report must be a different one."""
    kept = run_program(GOING_BACK, tmp_path)
    assert [count for _, count in kept] == [5, 6]
    for location, count in kept:
        assert (ckptcore.load(f"{location}/model")["w"] == count).all()


def test_an_unreported_step_is_replaced_on_an_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker was killed between the commit and the report.

    The test uses a fake of Ray, because only one process can use a storage in memory.
    """
    memory = fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("memory")))
    storage = SimpleNamespace(
        storage_filesystem=memory, build_checkpoint_path_from_name=lambda name: f"not-reported/{name}"
    )
    context = SimpleNamespace(get_storage=lambda: storage, get_world_rank=lambda: 0)
    reported = list[Checkpoint]()
    for name, fake in {
        "get_context": lambda: context,
        "get_all_reported_checkpoints": lambda mode: [],
        "report": lambda metrics, checkpoint, **options: reported.append(checkpoint),
    }.items():
        monkeypatch.setattr(ray_train.ray.train, name, fake)
    monkeypatch.setattr(ray_train, "broadcast_from_rank_zero", lambda value: value)
    marker = ckptcore.Context(io=ckptcore.context.IOOptions(without_conditions="marker"))
    for number in (1, 2):
        save_and_report(7, {"model": {"w": number}}, {}, context=marker)
    assert [checkpoint.path for checkpoint in reported] == ["not-reported/checkpoint_000007"] * 2
    assert ckptcore.load(f"{checkpoint_location(reported[1])}/model") == {"w": 2}


def test_file_systems(tmp_path: Path) -> None:
    """Ray replaces a path or URL in RunConfig(storage_path=...) by a file system of pyarrow."""
    location = os.fspath(tmp_path / "c")
    ckptcore.save(location, {"n": 3})
    subtree = fs.SubTreeFileSystem(os.fspath(tmp_path), fs.LocalFileSystem())
    of_fsspec = fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("file")))
    of_directory = fs.PyFileSystem(fs.FSSpecHandler(DirFileSystem(os.fspath(tmp_path), fsspec.filesystem("file"))))
    below = fs.SubTreeFileSystem(os.fspath(tmp_path), of_fsspec)
    for made, at in ((subtree, "c"), (of_fsspec, location), (of_directory, "c"), (below, "c")):
        assert ckptcore.load(checkpoint_location(Checkpoint(at, made))) == {"n": 3}
    azure = fs.AzureFileSystem(account_name="account", account_key="a2V5")
    assert checkpoint_location(Checkpoint("box/c", azure)) == "abfs://box@account.dfs.core.windows.net/c"
    emulated = fs.AzureFileSystem(account_name="account", account_key="a2V5", dfs_storage_authority="127.0.0.1:10000")
    assert checkpoint_location(Checkpoint("box/c", emulated)) == "abfs://box/c"
    memory = fs.SubTreeFileSystem("runs", fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("memory"))))
    marker = ckptcore.Context(io=ckptcore.context.IOOptions(without_conditions="marker"))
    ckptcore.save(checkpoint_location(Checkpoint("c", memory)), {"n": 4}, context=marker)
    assert fsspec.filesystem("memory").exists("/runs/c/checkpoint.json")

    class Strange(fs.FileSystemHandler):  # type: ignore[misc]  # pyarrow has no types
        def get_type_name(self) -> str:
            return "strange"

    Strange.__abstractmethods__ = frozenset()
    with pytest.raises(ValueError, match=r"'py::strange', which has no URL.*Set RunConfig\(storage_path=...\)"):
        checkpoint_location(Checkpoint("c", fs.PyFileSystem(Strange())))
    filesystem, path = fs.FileSystem.from_uri(location)
    assert ckptcore.load(checkpoint_location(Checkpoint(path, filesystem))) == {"n": 3}
    for made, scheme in ((fs.S3FileSystem(region="eu-west-1", anonymous=True), "s3"), (fs.GcsFileSystem(), "gs")):
        assert checkpoint_location(Checkpoint("bucket/c", made)) == f"{scheme}://bucket/c"


def test_objects_that_cannot_be_saved_are_refused_before_the_training(tmp_path: Path) -> None:
    for message in run_program(REFUSED, tmp_path):
        assert "in 'loop': lock" in message
        assert "in 'loop': deep[0]" in message
