"""Lightning with `CkptcoreIO` and the sharded strategies: kills and resumes, ModelCheckpoint, and jobs."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from ckptcore_integrations.lightning import CkptcoreFSDPStrategy, CkptcoreIO, CkptcoreModelParallelStrategy
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.distributed.fsdp import FullyShardedDataParallel

import ckptcore
from ckptcore import Context
from ckptcore.context import JobOptions, SingleProcess
from ckptcore.errors import CheckpointError, CheckpointNotFoundError, InvalidLocationError, UnsupportedLeafError
from ckptcore.events import Event
from plugins.integrations.tests.trainers import lightning_program
from plugins.integrations.tests.trainers.lightning_program import Digits, Sharded, fit, same, trainer
from tests.docs.pages import code_blocks
from tests.docs.running import page_module, run_python

torch.set_num_threads(1)
warnings.filterwarnings("ignore", module="lightning|torch")

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns about CPUs, workers, loggers and its own functions


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module, the Trainer and the last checkpoint of a finished run with Lightning's own files."""
    directory = tmp_path_factory.mktemp("plain")
    run = trainer(directory)
    module = fit(run)
    return module, torch.load(directory / "last.ckpt", weights_only=True), directory / "last.ckpt"


def kill_in_save(directory: Path, number: int, *, asynchronous: bool) -> None:
    """Train, and kill this process in a save, after its files are written and before its commit."""
    writes = []

    def kill(event: Event) -> None:
        if event.phase == "write" and writes.append(event.location) is None and len(writes) == number:
            (directory.parent / "writes").write_text("\n".join(writes))
            os.kill(os.getpid(), signal.SIGKILL)

    fit(trainer(directory, plugins=[CkptcoreIO(asynchronous=asynchronous, context=Context(observers=[kill]))]))


@pytest.mark.system
@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
def test_a_killed_run_resumes_bit_for_bit(uninterrupted: Any, tmp_path: Path, *, asynchronous: bool) -> None:
    module, expected, _ = uninterrupted
    directory = tmp_path / "run"
    ended = lightning_program.start(
        f"kill_in_save(Path({str(directory)!r}), 4, asynchronous={asynchronous})", "test_lightning"
    )
    assert ended.wait(240) == -signal.SIGKILL, ended.communicate()[1].decode()
    assert (tmp_path / "writes").read_text().endswith("last.ckpt")  # killed during this replacement

    run = trainer(directory, plugins=[CkptcoreIO(asynchronous=asynchronous)])
    resumed = fit(run, ckpt_path="last")
    assert resumed.seen == module.seen[4:]
    actual = ckptcore.load(directory / "last.ckpt", framework="torch")
    for name in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step", "epoch"):
        assert same(actual[name], expected[name]), name
    assert ckptcore.verify(directory / "last.ckpt").ok


@pytest.mark.parametrize("last", [True, "link"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
def test_model_checkpoint_keeps_links_and_accepts_directories(tmp_path: Path, *, asynchronous: bool, last: Any) -> None:
    run = trainer(tmp_path, last=last, plugins=[CkptcoreIO(asynchronous=asynchronous)])
    module = fit(run)
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=12.ckpt", "step=8.ckpt"]
    assert ckptcore.verify(tmp_path / "step=8.ckpt").ok
    assert run.checkpoint_callback.best_model_path == str(tmp_path / "step=12.ckpt")

    for path in ("best", "last", str(tmp_path / "last.ckpt")):
        other = trainer(tmp_path, max_steps=12, last=last, plugins=[CkptcoreIO(asynchronous=asynchronous)])
        other.checkpoint_callback.best_model_path = run.checkpoint_callback.best_model_path
        resumed = fit(other, ckpt_path=path)
        assert other.global_step == 12
        assert same(dict(resumed.state_dict()), dict(module.state_dict()))


def test_files_of_lightning_are_loaded(uninterrupted: Any, tmp_path: Path) -> None:
    _, expected, path = uninterrupted
    assert same(CkptcoreIO().load_checkpoint(path), expected)
    run = trainer(tmp_path, max_steps=16, plugins=[CkptcoreIO()])
    ours = fit(run, ckpt_path=str(path))
    theirs = fit(trainer(tmp_path / "theirs", max_steps=16), ckpt_path=str(path))
    assert ours.seen == theirs.seen != []


def continue_run(directory: Path, *, plugins: Any, keep: int, last: Any, ckpt_path: str) -> Any:
    """Train 8 steps with Lightning's own files. Then resume from a file with the plugins, and train up to step 16."""
    fit(trainer(directory, max_steps=8, keep=keep, last=last))
    path = ckpt_path if ckpt_path == "last" else str(directory / ckpt_path)
    return fit(trainer(directory, max_steps=16, keep=keep, last=last, plugins=plugins), ckpt_path=path)


@pytest.mark.parametrize("last", [True, "link", False])
@pytest.mark.parametrize("keep", [1, 2, -1])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
@pytest.mark.parametrize("ckpt_path", ["last", "step=4.ckpt", "step=8.ckpt"])
def test_a_run_of_plain_lightning_continues(
    tmp_path: Path, keep: int, *, asynchronous: bool, last: Any, ckpt_path: str
) -> None:
    if (ckpt_path == "last" and not last) or (ckpt_path == "step=4.ckpt" and keep == 1):
        pytest.skip("this file does not exist")
    theirs = continue_run(tmp_path / "theirs", plugins=[], keep=keep, last=last, ckpt_path=ckpt_path)
    io = CkptcoreIO(asynchronous=asynchronous)
    ours = continue_run(tmp_path / "ours", plugins=[io], keep=keep, last=last, ckpt_path=ckpt_path)
    assert ours.seen == theirs.seen
    names = sorted(os.listdir(tmp_path / "theirs"))
    assert sorted(os.listdir(tmp_path / "ours")) == names
    for name in names:
        assert (tmp_path / "ours" / name).is_symlink() == (tmp_path / "theirs" / name).is_symlink(), name
        expected = torch.load(tmp_path / "theirs" / name, weights_only=True)
        actual = io.load_checkpoint(tmp_path / "ours" / name)
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
            assert same(actual[part], expected[part]), (name, part)


@pytest.mark.parametrize("name", ["unlink", "rename"])
def test_a_run_that_is_killed_during_the_replacement_of_a_file_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    class Killed(BaseException):
        """Raised to end the run. Handlers of `Exception` do not catch it."""

    fit(trainer(tmp_path, max_steps=8, keep=-1, last=True))
    before = trainer(tmp_path, max_steps=12, keep=-1, last=True, plugins=[CkptcoreIO()])
    call = getattr(os, name)

    def kill_or_call(path: Any, *arguments: Any, **options: Any) -> None:
        if name == "unlink" and Path(path) == tmp_path / "last.ckpt":
            raise Killed
        if name == "rename" and os.path.exists(tmp_path / "last.replacing.ckpt"):
            raise Killed
        call(path, *arguments, **options)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, name, kill_or_call)
        fit(before, ckpt_path=str(tmp_path / "step=8.ckpt"))
    after = trainer(tmp_path, max_steps=16, keep=-1, last=True, plugins=[CkptcoreIO()])
    resumed = fit(after, ckpt_path="last")
    assert len(resumed.seen) == 4  # no committed step is trained again
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", *sorted(f"step={step}.ckpt" for step in (4, 8, 12, 16))]


@pytest.mark.parametrize("moment", ["before the copy", "after the copy"])
def test_a_load_finds_a_replacement_that_was_killed_at_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    class Killed(BaseException):
        """Raised to end the save. Handlers of `Exception` do not catch it."""

    copy = ckptcore.copy

    def kill(source: Any, target: Any, **options: Any) -> None:
        if moment == "after the copy":
            copy(source, target, **options)
        raise Killed

    io, url = CkptcoreIO(), f"file://{tmp_path}/a.ckpt"
    TorchCheckpointIO().save_checkpoint({"w": torch.zeros(2)}, url)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(ckptcore, "copy", kill)
        io.save_checkpoint({"w": torch.ones(2)}, url)
    for _ in range(2):  # a load changes nothing
        assert same(io.load_checkpoint(url), {"w": torch.ones(2)})
    io.save_checkpoint({"w": torch.ones(3)}, url)
    assert same(io.load_checkpoint(url), {"w": torch.ones(3)})
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.parametrize("start", ["", "file://"])
@pytest.mark.parametrize("of_lightning", [False, True])
def test_deleted_checkpoint_is_not_restored_from_replacement(tmp_path: Path, start: str, *, of_lightning: bool) -> None:
    io, location = CkptcoreIO(), f"{start}{tmp_path}/a.ckpt"
    (TorchCheckpointIO() if of_lightning else io).save_checkpoint({"w": 1}, location)
    io.save_checkpoint({"w": 2}, f"{start}{tmp_path}/a.replacing.ckpt")  # as left by a killed process
    io.remove_checkpoint(location)
    assert os.listdir(tmp_path) == []
    with pytest.raises(CheckpointNotFoundError):
        io.load_checkpoint(location)


def test_a_file_of_the_user_does_not_stop_the_next_save(tmp_path: Path) -> None:
    io = CkptcoreIO()
    for number in range(2):
        io.save_checkpoint({"w": number}, tmp_path / "last.ckpt")
        (tmp_path / "last.ckpt/notes.txt").write_text("mine")
    assert io.load_checkpoint(tmp_path / "last.ckpt")["w"] == 1


def test_a_link_is_replaced_and_removed_without_its_target(tmp_path: Path) -> None:
    io = CkptcoreIO()
    io.save_checkpoint({"w": 1}, tmp_path / "step=8.ckpt")
    (tmp_path / "last.ckpt").symlink_to("step=8.ckpt")
    io.save_checkpoint({"w": 2}, tmp_path / "last.ckpt")
    assert [io.load_checkpoint(tmp_path / name)["w"] for name in ("step=8.ckpt", "last.ckpt")] == [1, 2]
    (tmp_path / "link.ckpt").symlink_to("step=8.ckpt")
    io.remove_checkpoint(tmp_path / "link.ckpt")
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=8.ckpt"]


def test_other_directories_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("kept")
    with pytest.raises(CheckpointError, match="notes.txt"):
        CkptcoreIO().save_checkpoint({"w": 1}, tmp_path / "mine")
    with pytest.raises(CheckpointError, match="not written by ckptcore"):
        CkptcoreIO().remove_checkpoint(tmp_path / "mine")
    assert os.listdir(tmp_path / "mine") == ["notes.txt"]


def test_a_file_of_lightning_at_a_url_is_replaced_and_removed() -> None:
    plain, io = TorchCheckpointIO(), CkptcoreIO()
    for name in ("a.ckpt", "b.ckpt"):
        plain.save_checkpoint({"w": 1}, f"memory://plain/{name}")
    io.save_checkpoint({"w": 2}, "memory://plain/a.ckpt")
    io.remove_checkpoint("memory://plain/b.ckpt")
    assert not any(get_filesystem("memory://plain").exists(f"memory://plain/{name}") for name in ("a.ckpt", "b.ckpt"))
    assert io.load_checkpoint("memory://plain/a.ckpt") == {"w": 2}
    with pytest.raises(CheckpointNotFoundError):
        io.load_checkpoint("memory://plain/a.replacing.ckpt")


def test_a_file_of_lightning_at_a_url_is_replaced_after_a_kill() -> None:
    """The killed process had committed its checkpoint next to the file."""
    io = CkptcoreIO()
    TorchCheckpointIO().save_checkpoint({"w": 1}, "memory://killed/a.ckpt")
    io.save_checkpoint({"w": 2}, "memory://killed/a.replacing.ckpt")
    io.save_checkpoint({"w": 3}, "memory://killed/a.ckpt")
    assert io.load_checkpoint("memory://killed/a.ckpt") == {"w": 3}
    assert not get_filesystem("memory://killed").exists("memory://killed/a.ckpt")
    with pytest.raises(CheckpointNotFoundError):
        io.load_checkpoint("memory://killed/a.replacing.ckpt")


def test_a_checkpoint_loads_with_the_saved_types(uninterrupted: Any, tmp_path: Path) -> None:
    module, expected, _ = uninterrupted
    io = CkptcoreIO(layout="dcp")
    io.save_checkpoint({**expected, "state_dict": module.state_dict()}, tmp_path / "checkpoint")
    actual = io.load_checkpoint(tmp_path / "checkpoint", weights_only=False)
    assert same(actual, expected)
    assert actual["state_dict"]._metadata == module.state_dict()._metadata


class Called(Digits):
    """A classifier whose checkpoints contain a function. Lightning pickles the function."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the function."""
        checkpoint["deep"] = [print]


class Locked(Called):
    """A classifier whose checkpoints contain a lock and a function."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the lock and the function."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["lock"] = threading.Lock()


class Early(Digits):
    """A classifier that saves a metric. The metric does not exist before the training."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the metric."""
        checkpoint["metric"] = float(self.trainer.callback_metrics["loss"])


@pytest.mark.parametrize("wrapped", [False, True])
def test_checkpoints_that_cannot_be_saved_are_refused_before_the_training(tmp_path: Path, *, wrapped: bool) -> None:
    module = Locked()
    io = AsyncCheckpointIO(CkptcoreIO()) if wrapped else CkptcoreIO()
    with pytest.raises(UnsupportedLeafError) as caught:
        fit(trainer(tmp_path, plugins=[io]), module)
    assert module.seen == []
    assert "\n  lock" in str(caught.value)
    assert "\n  deep[0]" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_only_checkpoints_of_ckptcore_are_checked_before_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = fit(trainer(tmp_path / "early", plugins=[CkptcoreIO()], max_steps=4), Early())
    assert "not checked before the training" in caplog.text
    assert ckptcore.load(tmp_path / "early" / "step=4.ckpt")["metric"] == module.trainer.callback_metrics["loss"]
    assert len(fit(trainer(tmp_path / "other", max_steps=2), Called()).seen) == 2


def fit_locked(directory: Path) -> None:
    """Train a sharded module that cannot be saved, and report the error and the number of steps."""

    class ShardedAndLocked(Sharded, Locked):
        pass

    module = ShardedAndLocked()
    strategy = CkptcoreModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    run = trainer(directory, devices=2, strategy=strategy)
    with pytest.raises(CheckpointError) as caught:
        fit(run, module)
    (directory.parent / f"report-{run.global_rank}").write_text(f"{len(module.seen)} {caught.value}")


@pytest.mark.system
def test_all_ranks_refuse_a_module_that_cannot_be_saved(tmp_path: Path) -> None:
    lightning_program.run_job(f"fit_locked(Path({str(tmp_path / 'run')!r}))", "test_lightning", 2)
    for rank in range(2):
        report = (tmp_path / f"report-{rank}").read_text()
        assert report.startswith("0 ")
        assert "lock" in report
        assert "deep[0]" in report


def test_storage_urls() -> None:
    io = CkptcoreIO()
    io.save_checkpoint({"state_dict": {"w": torch.ones(2)}}, "memory://lightning/a.ckpt")
    assert same(io.load_checkpoint("memory://lightning/a.ckpt"), {"state_dict": {"w": torch.ones(2)}})
    io.remove_checkpoint("memory://lightning/a.ckpt")
    io.remove_checkpoint("memory://lightning/a.ckpt")  # removing a missing checkpoint is no error, as in Lightning
    with pytest.raises(CheckpointNotFoundError):
        io.load_checkpoint("memory://lightning/a.ckpt")


def test_the_home_directory_and_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    io = CkptcoreIO()
    io.save_checkpoint({"state_dict": {"w": torch.ones(2)}}, "~/runs/a.ckpt")
    assert (tmp_path / "home/runs/a.ckpt").is_dir()
    assert io.load_checkpoint("~/runs/a.ckpt")["state_dict"]["w"].tolist() == [1, 1]
    io.remove_checkpoint("~/runs/a.ckpt")
    assert not (tmp_path / "home/runs/a.ckpt").exists()
    with pytest.raises(InvalidLocationError, match="NOWHERE"):
        io.save_checkpoint({"state_dict": {}}, "$NOWHERE/runs/a.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_tensors_go_to_the_device_of_map_location(tmp_path: Path) -> None:
    io = CkptcoreIO()
    io.save_checkpoint({"state_dict": {"w": torch.ones(2)}, "epoch": 3}, tmp_path / "a")
    for device in ("meta", torch.device("meta")):
        loaded = io.load_checkpoint(tmp_path / "a", map_location=device)
        assert loaded["state_dict"]["w"].device.type == "meta"
        assert loaded["epoch"] == 3
    for location in (lambda storage, _: storage, {"cuda:1": "cuda:0"}):
        with pytest.raises(TypeError, match="pass a device or its name. .* do not record devices"):
            io.load_checkpoint(tmp_path / "a", map_location=location)
    assert same(io.load_checkpoint(tmp_path / "a", map_location="cpu")["state_dict"], {"w": torch.ones(2)})


def test_unsupported_options_are_refused(tmp_path: Path) -> None:
    state = {"state_dict": {"w": torch.ones(2)}}
    with pytest.raises(TypeError, match=r"pass Context\(storage=\{scheme: options\}\) as context instead"):
        CkptcoreIO().save_checkpoint(state, tmp_path / "a", storage_options={})
    with pytest.raises(ValueError, match=r"rank 0 saves alone; leave out Context\(job=...\)"):
        CkptcoreIO(context=Context(job=JobOptions(coordinator=SingleProcess())))
    for number, context in enumerate((Context(storage={"file": {}}), Context())):
        CkptcoreIO(context=context).save_checkpoint(state, tmp_path / str(number))
        assert same(CkptcoreIO(context=context).load_checkpoint(tmp_path / str(number)), state)
    with pytest.raises(ValueError, match="any number of ranks can load. Leave it 'sharded'"):
        CkptcoreFSDPStrategy(state_dict_type="full")
    with pytest.raises(ValueError, match="any number of ranks can load. Leave it True"):
        CkptcoreModelParallelStrategy(save_distributed_checkpoint=False)
    CkptcoreFSDPStrategy(state_dict_type="sharded")
    CkptcoreModelParallelStrategy(save_distributed_checkpoint=True)
    with pytest.raises(TypeError, match="Context"):
        CkptcoreFSDPStrategy().save_checkpoint({}, tmp_path / "a", storage_options={})


def test_old_checkpoints_are_removed_after_the_running_save(tmp_path: Path) -> None:
    blocked, proceed = threading.Event(), threading.Event()
    proceed.set()

    def block(event: Event) -> None:
        if event.phase == "write":
            blocked.set()
            proceed.wait()

    io = CkptcoreIO(asynchronous=True, context=Context(observers=[block]))
    weights = torch.zeros(2)
    io.save_checkpoint({"w": weights}, tmp_path / "old")
    io.teardown()
    blocked.clear()
    proceed.clear()
    io.save_checkpoint({"w": weights}, tmp_path / "new")
    weights += 1  # this change must not be in the checkpoint
    io.remove_checkpoint(tmp_path / "old")
    blocked.wait()
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == ["old"]
    proceed.set()
    assert same(io.load_checkpoint(tmp_path / "new"), {"w": torch.zeros(2)})  # the load waits for the save
    assert sorted(os.listdir(tmp_path)) == ["new"]


def test_a_failed_save_removes_nothing(tmp_path: Path) -> None:
    io = CkptcoreIO(asynchronous=True)
    io.save_checkpoint({"w": 1}, tmp_path / "old")
    io.teardown()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError):
        for path in (tmp_path / "file" / "new", tmp_path / "newer"):
            io.save_checkpoint({"w": 2}, path)
            io.remove_checkpoint(tmp_path / "old")
    io.teardown()
    assert io.load_checkpoint(tmp_path / "old") == {"w": 1}


def ddp(directory: Path) -> None:
    """Train in a job, resume in the same job, and compare."""
    whole = fit(trainer(directory, devices=2, strategy="ddp", plugins=[CkptcoreIO()]))
    half = trainer(directory / "half", max_steps=8, devices=2, strategy="ddp", plugins=[CkptcoreIO()])
    fit(half)
    rest = fit(
        trainer(directory / "half", devices=2, strategy="ddp", plugins=[CkptcoreIO()]),
        ckpt_path=str(directory / "half" / "last.ckpt"),
    )
    assert same(dict(whole.state_dict()), dict(rest.state_dict()))


@pytest.mark.system
def test_rank_0_saves_and_all_ranks_load(tmp_path: Path) -> None:
    lightning_program.run_job(f"ddp(Path({str(tmp_path)!r}))", "test_lightning", 2)
    assert ckptcore.verify(tmp_path / "last.ckpt").ok


class FSDPOnCPU(CkptcoreFSDPStrategy):
    """An FSDP strategy on the CPU. Lightning would pass the index of a GPU as the device."""

    def _setup_model(self, model: Any) -> Any:
        wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        self._reset_optimizers_and_schedulers()
        return wrapped


def sharded(kind: str, directory: Path, size: int) -> Any:
    """Return a Trainer with a sharded strategy, and its module."""
    if kind == "fsdp":
        return trainer(directory, devices=size, strategy=FSDPOnCPU()), Digits()
    strategy = CkptcoreModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)
    return trainer(directory, devices=size, strategy=strategy), Sharded()


def train_sharded(kind: str, directory: Path) -> None:
    """Train in a job of two ranks, resume from the middle, and compare the losses."""
    run, module = sharded(kind, directory, 2)
    fit(run, module)
    (steps,) = {int(state["step"]) for state in run.optimizers[0].state.values()}
    assert steps == 12  # the check before the training made no step
    again, resumed = sharded(kind, directory / "again", 2)
    again.callbacks.append(SaveAtStart())
    if again.local_rank == 0:  # files of Lightning, which saves replace
        (directory / "again").mkdir()
        (directory / "again" / "loaded").touch()
        (directory / "again" / "kept").touch()
    again.callbacks.append(FailToReplace())
    fit(again, resumed, ckpt_path=str(directory / "step=8.ckpt"))
    assert resumed.seen == module.seen[8:]


class SaveAtStart(lightning.Callback):  # type: ignore[misc]  # without types here
    """A callback that saves the restored state."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Save once all state is restored."""
        trainer.save_checkpoint(Path(trainer.checkpoint_callback.dirpath) / "loaded")


class FailToReplace(lightning.Callback):  # type: ignore[misc]  # without types here
    """A callback that saves to a path at which rank 0 cannot remove a file of Lightning."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Expect an error on all ranks."""
        kept, unlink = Path(trainer.checkpoint_callback.dirpath) / "kept", os.unlink

        def refuse_or_unlink(path: Any, **options: Any) -> None:
            if Path(path) == kept:
                raise PermissionError("not permitted")
            unlink(path, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "unlink", refuse_or_unlink)
            with pytest.raises((PermissionError, CheckpointError), match="not permitted"):
                trainer.save_checkpoint(kept)


def load_sharded(kind: str, directory: Path) -> None:
    """Load a checkpoint of two ranks in a job of one rank, save it again, and continue the training."""
    run, module = sharded(kind, directory / "alone", 1)
    run.callbacks.append(SaveAtStart())
    fit(run, module, ckpt_path=str(directory / "step=8.ckpt"))
    assert run.global_step == 12


def assert_same_state(left: Path, right: Path) -> None:
    """Compare the model and the optimizers of two checkpoints."""
    first, other = (ckptcore.load(path, framework="torch") for path in (left, right))
    for name in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert same(first[name], other[name]), name


@pytest.mark.system
@pytest.mark.parametrize("kind", ["fsdp", "model parallel"])
def test_sharded_checkpoints_are_loaded_by_any_number_of_ranks(tmp_path: Path, kind: str) -> None:
    lightning_program.run_job(f"train_sharded({kind!r}, Path({str(tmp_path)!r}))", "test_lightning", 2)
    assert sorted(os.listdir(tmp_path)) == ["again", "last.ckpt", "step=12.ckpt", "step=8.ckpt"]
    assert len(list((tmp_path / "last.ckpt").glob("*.distcp"))) == 2  # each rank wrote its shards
    assert_same_state(tmp_path / "last.ckpt", tmp_path / "again" / "last.ckpt")
    assert_same_state(tmp_path / "step=8.ckpt", tmp_path / "again" / "loaded")
    lightning_program.run_job(f"load_sharded({kind!r}, Path({str(tmp_path)!r}))", "test_lightning", 1)
    assert_same_state(tmp_path / "step=8.ckpt", tmp_path / "alone" / "loaded")


def test_the_programs_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[4] / "docs/how-to/with-lightning.md"
    module = page_module(page, "trainers")
    for block in code_blocks(page.read_text(encoding="utf-8")):
        if block.language == "python":
            run_python(block, page, module)
