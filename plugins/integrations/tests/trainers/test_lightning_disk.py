"""Features of Lightning that inspect the disk: versions of names, links, last checkpoints, SLURM, Tuner, exceptions."""

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
from ckptcore_integrations import lightning_paths
from ckptcore_integrations.lightning import CheckState, CkptcoreFSDPStrategy, CkptcoreIO
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.tuner import Tuner
from torch.optim.swa_utils import get_ema_avg_fn

import ckptcore
from ckptcore import Context
from ckptcore.errors import CheckpointError
from ckptcore.events import Event
from plugins.integrations.tests.trainers.lightning_program import (
    Digits,
    RandomState,
    fit,
    loader,
    same,
    start,
    trainer,
)

warnings.filterwarnings("ignore", module="lightning|torch")

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns about CPUs, workers, loggers and its own functions

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def run_with(directory: Path, savers: list[Any], plugins: list[Any], **options: Any) -> Any:
    """Train 12 steps, two epochs, and return the Trainer."""
    run = lightning.Trainer(
        max_steps=12,
        callbacks=[*savers, RandomState()],
        plugins=plugins,
        default_root_dir=directory,
        **QUIET,
        **options,
    )
    fit(run)
    return run


CALLBACKS: dict[str, Any] = {
    "one name": [{"filename": "model", "save_top_k": -1, "every_n_train_steps": 4}],
    "one name without versions": [
        {"filename": "model", "save_top_k": -1, "every_n_train_steps": 4, "enable_version_counter": False}
    ],
    "one name that is kept once": [{"filename": "model", "every_n_train_steps": 4}],
    "link": [{"save_last": "link", "every_n_train_steps": 4, "monitor": "step", "mode": "max"}],
    "link to the best of three": [{"save_last": "link", "every_n_train_steps": 2, "monitor": "loss", "save_top_k": 3}],
    "last": [{"save_last": True, "every_n_train_steps": 4, "monitor": "loss", "save_top_k": 2}],
    "last alone": [{"save_last": True, "save_top_k": 0, "every_n_train_steps": 4}],
    "steps and epochs": [
        {"every_n_train_steps": 6, "save_top_k": -1, "save_last": "link"},
        {"every_n_epochs": 1, "save_top_k": -1, "save_last": True},
    ],
}


def listing(directory: Path, load: Any) -> dict[str, Any]:
    """Return by name the step of each checkpoint and the target of each link."""
    return {
        path.name: (load(path)["global_step"], path.is_symlink() and os.readlink(path)) for path in directory.iterdir()
    }


@pytest.mark.parametrize(
    ("name", "io"),
    [
        *[(name, "asynchronous") for name in CALLBACKS],
        ("link", "blocking"),
        ("one name", "wrapped"),
        ("link", "wrapped"),
    ],
)
@pytest.mark.brings(
    "callbacks `ModelCheckpoint` that save in the background, with links and versions", "lightning", "same"
)
def test_a_run_leaves_the_names_of_lightning(tmp_path: Path, name: str, io: str) -> None:
    kinds: dict[str, Any] = {
        "asynchronous": lambda: CkptcoreIO(asynchronous=True),
        "blocking": CkptcoreIO,
        "wrapped": lambda: AsyncCheckpointIO(CkptcoreIO()),
    }
    run_with(tmp_path, [ModelCheckpoint(tmp_path / "theirs", **options) for options in CALLBACKS[name]], [])
    savers = [ModelCheckpoint(tmp_path / "new" / "ours", **options) for options in CALLBACKS[name]]
    run_with(tmp_path, savers, [kinds[io]()])
    theirs = listing(tmp_path / "theirs", lambda path: torch.load(path, weights_only=True))
    assert listing(tmp_path / "new" / "ours", ckptcore.load) == theirs


def kill_at_link(directory: Path, number: int, *, asynchronous: bool) -> None:
    """Train, and kill this process between a commit and the link to it."""
    links = []
    create = lightning_paths.create_link

    def kill(path: str, link: str) -> None:
        links.append(path)
        if len(links) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        create(path, link)

    lightning_paths.create_link = kill
    fit(trainer(directory, last="link", keep=1, plugins=[CkptcoreIO(asynchronous=asynchronous)]))


def kill_in_save(directory: Path, number: int, *, asynchronous: bool) -> None:
    """Train, and kill this process in a save, after its files are written and before its commit."""
    writes = []

    def kill(event: Event) -> None:
        if event.phase == "write" and writes.append(event.location) is None and len(writes) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    io = CkptcoreIO(asynchronous=asynchronous, context=Context(observers=[kill]))
    fit(trainer(directory, last="link", keep=1, plugins=[io]))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module and the last checkpoint of a finished run with Lightning's own files."""
    directory = tmp_path_factory.mktemp("plain")
    module = fit(trainer(directory))
    return module, torch.load(directory / "last.ckpt", weights_only=True)


@pytest.mark.system
@pytest.mark.parametrize(
    ("function", "number", "asynchronous"),
    [
        ("kill_in_save", 2, True),
        ("kill_at_link", 2, True),
        *[
            pytest.param(function, number, asynchronous, marks=pytest.mark.slow)
            for function, number, asynchronous in [
                ("kill_in_save", 2, False),
                ("kill_in_save", 3, True),
                ("kill_in_save", 3, False),
                ("kill_at_link", 2, False),
                ("kill_at_link", 3, True),
                ("kill_at_link", 3, False),
            ]
        ],
    ],
)
@pytest.mark.brings("a run with `save_last='link'` that is killed in a save, or before the link", "lightning", "same")
def test_a_killed_run_with_a_link_resumes_bit_for_bit(
    uninterrupted: Any, tmp_path: Path, function: str, number: int, *, asynchronous: bool
) -> None:
    module, expected = uninterrupted
    directory = tmp_path / "run"
    call = f"{function}(Path({str(directory)!r}), {number}, asynchronous={asynchronous})"
    ended = start(call, "test_lightning_disk")
    assert ended.wait(240) == -signal.SIGKILL, ended.communicate()[1].decode()

    run = trainer(directory, last="link", keep=1, plugins=[CkptcoreIO(asynchronous=asynchronous)])
    resumed = fit(run, ckpt_path="last")
    newest = number if function == "kill_at_link" and not asynchronous else number - 1
    assert len(resumed.seen) in (12 - 4 * (number - 1), 12 - 4 * newest)
    assert resumed.seen == module.seen[-len(resumed.seen) :]
    actual = CkptcoreIO().load_checkpoint(directory / "last.ckpt")
    for name in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step", "epoch"):
        assert same(actual[name], expected[name]), name
    assert (directory / "last.ckpt").is_symlink()


@pytest.mark.parametrize("path", ["last", "the path", "load_from_checkpoint"])
def test_a_dangling_link_is_repaired(tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture) -> None:
    module = fit(trainer(tmp_path, keep=-1, max_steps=8, last="link", plugins=[CkptcoreIO()]))
    (tmp_path / "last.ckpt").unlink()
    (tmp_path / "last.ckpt").symlink_to("step=12.ckpt")
    (tmp_path / "step=10.ckpt").mkdir()  # not a checkpoint
    os.utime(tmp_path / "step=4.ckpt")  # as after a copy, which changes the times
    if path == "load_from_checkpoint":
        loaded = Digits.load_from_checkpoint(tmp_path / "last.ckpt")
        assert same(dict(loaded.state_dict()), dict(module.state_dict()))
    else:
        run = trainer(tmp_path, keep=-1, last="link", plugins=[CkptcoreIO(asynchronous=True)])
        resumed = fit(run, ckpt_path="last" if path == "last" else str(tmp_path / "last.ckpt"))
        assert len(resumed.seen) == 4
        assert os.readlink(tmp_path / "last.ckpt") == "step=12.ckpt"
        assert (tmp_path / "last.ckpt").exists()
    assert "which does not exist" in caplog.text
    assert "step=10.ckpt is not read" in caplog.text


def test_the_last_checkpoint_has_the_largest_step(tmp_path: Path) -> None:
    for step in (8, 4):
        run = trainer(tmp_path / str(step), max_steps=step, plugins=[CkptcoreIO()])
        fit(run)
    os.rename(tmp_path / "4" / "last.ckpt", tmp_path / "8" / "last-v1.ckpt")
    os.utime(tmp_path / "8" / "last.ckpt", (1, 1))  # as if a machine with a slow clock had saved it
    resumed = fit(trainer(tmp_path / "8", plugins=[CkptcoreIO()]), ckpt_path="last")
    assert len(resumed.seen) == 4


def test_a_link_replaces_a_directory_or_link_of_its_name(tmp_path: Path) -> None:
    io = CkptcoreIO()
    for step in (4, 8):
        io.save_checkpoint({"global_step": step}, tmp_path / f"{step}.ckpt")
    io.save_checkpoint({"global_step": 0}, tmp_path / "last.ckpt")
    for step in (4, 8):  # the link replaces a directory, and then a link
        io.link(str(tmp_path / f"{step}.ckpt"), str(tmp_path / "last.ckpt"))
        assert io.load_checkpoint(tmp_path / "last.ckpt") == {"global_step": step}
        assert sorted(os.listdir(tmp_path)) == ["4.ckpt", "8.ckpt", "last.ckpt"]


def test_checkpoints_of_slurm_are_committed_when_the_save_returns(tmp_path: Path) -> None:
    def fail(event: Event) -> None:
        if event.phase == "write":
            raise KeyboardInterrupt

    run = lightning.Trainer(
        max_steps=4,
        default_root_dir=tmp_path,
        plugins=[CkptcoreIO(asynchronous=True)],
        enable_checkpointing=False,
        **QUIET,
    )
    module = fit(run)
    path = run._checkpoint_connector.hpc_save_path(run.default_root_dir)
    run.save_checkpoint(path)
    assert ckptcore.verify(path).ok
    run.strategy.checkpoint_io = CkptcoreIO(context=Context(observers=[fail]))
    with pytest.raises(KeyboardInterrupt):  # may leave a hidden directory, which Lightning must not count
        run.save_checkpoint(run._checkpoint_connector.hpc_save_path(run.default_root_dir))
    again = lightning.Trainer(max_steps=4, default_root_dir=tmp_path, plugins=[CkptcoreIO()], **QUIET)
    resumed = fit(again, ckpt_path="hpc")
    assert again.ckpt_path == os.fspath(tmp_path / "hpc_ckpt_1.ckpt")
    assert same(dict(resumed.state_dict()), dict(module.state_dict()))


class Tuned(Digits):
    """The classifier with hyperparameters that the Tuner changes."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 1e-2, 8

    def train_dataloader(self) -> Any:
        """Return batches."""
        return torch.utils.data.DataLoader(loader().dataset, batch_size=self.batch_size)


@pytest.mark.brings("the learning rate finder and the batch size finder", "lightning", "same")
def test_the_tuner_restores_what_it_saved(tmp_path: Path) -> None:
    run = lightning.Trainer(max_steps=4, default_root_dir=tmp_path, plugins=[CkptcoreIO(asynchronous=True)], **QUIET)
    module = Tuned()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    tuner = Tuner(run)
    tuner.lr_find(module, num_training=3, update_attr=False)
    tuner.scale_batch_size(module, max_trials=2, steps_per_trial=1)
    assert same(dict(module.state_dict()), before)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


AVERAGES: dict[str, Any] = {
    "SWA": lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1),
}
if hasattr(callbacks, "WeightAveraging"):  # since Lightning 2.6
    AVERAGES["EMA"] = lambda: callbacks.WeightAveraging(avg_fn=get_ema_avg_fn(0.9))


@pytest.mark.brings("averages of weights: `StochasticWeightAveraging`, `WeightAveraging`", "lightning", "same")
@pytest.mark.parametrize("name", AVERAGES)
def test_averages_of_weights_resume_as_those_of_lightning(tmp_path: Path, name: str) -> None:
    def train(epochs: int, plugins: list[Any], directory: Path, **options: Any) -> Any:
        saver = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=8, save_top_k=-1)
        run = lightning.Trainer(
            max_epochs=epochs, callbacks=[saver, AVERAGES[name](), RandomState()], plugins=plugins, **QUIET
        )
        return fit(run, **options)

    whole = train(4, [CkptcoreIO(asynchronous=True)], tmp_path / "ours")
    rest = train(4, [CkptcoreIO()], tmp_path / "rest", ckpt_path=tmp_path / "ours" / "step=16.ckpt")
    train(4, [], tmp_path / "theirs")
    theirs = train(4, [], tmp_path / "again", ckpt_path=tmp_path / "theirs" / "step=16.ckpt", weights_only=False)
    assert rest.seen == theirs.seen
    assert same(dict(rest.state_dict()), dict(theirs.state_dict()))
    if name == "EMA":  # Lightning does not save the average of SWA
        assert same(dict(rest.state_dict()), dict(whole.state_dict()))


class Interrupted(Digits):
    """The classifier, which raises an exception in the 6th step."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error: BaseException | None = error

    def training_step(self, batch: Any, number: int) -> Any:
        """Raise the exception once."""
        if len(self.seen) == 5 and self.error is not None:
            raise self.error
        return super().training_step(batch, number)


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()], ids=["exception", "Ctrl-C"])
@pytest.mark.parametrize("kind", ["save_on_exception", "OnExceptionCheckpoint"])
def test_a_checkpoint_of_an_exception_is_committed(tmp_path: Path, kind: str, error: BaseException) -> None:
    saver: Any = OnExceptionCheckpoint(tmp_path, "last")
    if kind == "save_on_exception":
        saver = ModelCheckpoint(tmp_path, filename="model", save_last="link", save_on_exception=True)
    run = lightning.Trainer(
        max_steps=12, callbacks=[saver, RandomState()], plugins=[CkptcoreIO(asynchronous=True)], **QUIET
    )
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises((ValueError, SystemExit)):
        fit(run, Interrupted(error))
    signal.signal(signal.SIGINT, handler)  # before it exits, Lightning ignores this signal
    assert ckptcore.verify(tmp_path / "last.ckpt").ok
    module = Interrupted(error)
    module.error = None
    resumed = fit(run_again(tmp_path), module, ckpt_path=tmp_path / "last.ckpt")
    assert len(resumed.seen) == 7


def run_again(directory: Path) -> Any:
    """Return a Trainer that saves once, at its last step."""
    saver = ModelCheckpoint(directory / "again", filename="model", every_n_train_steps=12)
    return lightning.Trainer(max_steps=12, callbacks=[saver, RandomState()], plugins=[CkptcoreIO()], **QUIET)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
def test_an_interrupted_save_can_be_repeated(tmp_path: Path, *, asynchronous: bool) -> None:
    interrupted, proceed = threading.Event(), threading.Event()

    def interrupt(event: Event) -> None:
        if event.phase == "write" and not interrupted.is_set():
            interrupted.set()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # Ctrl-C
            proceed.wait(0 if threading.current_thread() is threading.main_thread() else None)

    io = CkptcoreIO(asynchronous=asynchronous, context=Context(observers=[interrupt]))
    with pytest.raises(KeyboardInterrupt):  # the signal interrupts the main thread at any place
        io.save_checkpoint({"w": 1}, tmp_path / "a.ckpt")
        io.teardown()
    proceed.set()
    io.save_checkpoint({"w": 2}, tmp_path / "a.ckpt")
    assert io.load_checkpoint(tmp_path / "a.ckpt") == {"w": 2}
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.brings("`Fabric.save` and `Fabric.load`", "lightning", "same")
def test_fabric_saves_and_loads(tmp_path: Path) -> None:
    def build() -> Any:
        fabric = lightning.Fabric(accelerator="cpu", plugins=[CkptcoreIO(asynchronous=True)])
        net = torch.nn.Linear(3, 2)
        return fabric, *fabric.setup(net, torch.optim.AdamW(net.parameters()))

    fabric, net, optimizer = build()
    fabric.backward(net(torch.ones(1, 3)).sum())
    optimizer.step()
    fabric.save(tmp_path / "new" / "a.ckpt", {"net": net, "optimizer": optimizer, "step": 3})
    other, loaded, loaded_optimizer = build()
    fabric.strategy.checkpoint_io.teardown()
    rest = {"net": loaded, "optimizer": loaded_optimizer, "step": 0}
    other.load(tmp_path / "new" / "a.ckpt", rest)
    assert rest["step"] == 3
    assert same(dict(loaded.state_dict()), dict(net.state_dict()))
    assert same(loaded_optimizer.state_dict(), optimizer.state_dict())


@pytest.mark.system
@pytest.mark.brings("strategy `ddp_spawn`", "lightning", "same")
def test_a_process_that_lightning_spawns_returns_its_weights(tmp_path: Path) -> None:
    ended = start(f"spawn(Path({str(tmp_path)!r}))", "test_lightning_disk")
    assert ended.wait(240) == 0, ended.communicate()[1].decode()


def spawn(directory: Path) -> None:
    """Train in spawned processes, and check the weights that this process gets from them."""
    module = Digits()
    run = trainer(directory, max_steps=4, devices=2, strategy="ddp_spawn", plugins=[CkptcoreIO(asynchronous=True)])
    run.fit(module, torch.utils.data.DataLoader(loader().dataset, batch_size=16))
    stored = ckptcore.load(directory / "last.ckpt", framework="torch")["state_dict"]
    assert same(dict(module.state_dict()), dict(stored))


@pytest.mark.brings("`CkptcoreIO` with `FSDPStrategy` or `CkptcoreFSDPStrategy`", "lightning", "refused")
@pytest.mark.brings("`CkptcoreIO` with `ModelParallelStrategy`", "lightning", "refused")
@pytest.mark.brings("`CkptcoreIO` with `DeepSpeedStrategy`", "lightning", "refused")
@pytest.mark.parametrize(
    ("strategy", "remedy"),
    [
        (FSDPStrategy, "CkptcoreFSDPStrategy"),
        (lambda: FSDPStrategy(state_dict_type="sharded"), "CkptcoreFSDPStrategy"),
        (ModelParallelStrategy, "CkptcoreModelParallelStrategy"),
        (DeepSpeedStrategy, "Leave out the plugin"),
        (CkptcoreFSDPStrategy, "give its options to the strategy"),
    ],
)
def test_strategies_that_do_not_use_the_io_are_refused_when_training_starts(
    monkeypatch: pytest.MonkeyPatch, strategy: Any, remedy: str
) -> None:
    pytest.importorskip("deepspeed" if strategy is DeepSpeedStrategy else "lightning")
    # The test needs only the type of the strategy. It starts no training, which would need GPUs.
    monkeypatch.setattr("lightning.pytorch.strategies.deepspeed._DEEPSPEED_AVAILABLE", True)
    made = strategy()
    made.checkpoint_io = CkptcoreIO()
    run = lightning.Trainer(max_steps=1, **QUIET)
    run._accelerator_connector.strategy = made
    with pytest.raises(CheckpointError, match=remedy):
        CheckState().setup(run, Digits(), "fit")
    CheckState().setup(run, Digits(), "validate")
