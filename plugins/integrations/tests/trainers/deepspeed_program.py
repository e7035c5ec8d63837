"""Programs for `test_deepspeed` that train with DeepSpeed on CPUs. They run in each process of a job."""

from __future__ import annotations

import json
import logging.handlers
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from ckptcore_integrations import added_files
from ckptcore_integrations import deepspeed as ours
from ckptcore_torch.named_optimizers import NamedOptimizer

import ckptcore
from plugins.integrations.tests.trainers.trainer_jobs import kill_before_commit

torch.set_num_threads(1)


class Net(torch.nn.Module):
    """A network with parameters of many shapes. Some are frozen, tied or unused, or lack gradients in some steps."""

    def __init__(self, *, alternates: bool) -> None:
        super().__init__()
        self.alternates = alternates  # True: a layer is used in every second step. False: from step 4 on
        self.embed = torch.nn.Embedding(11, 6)
        self.conv = torch.nn.Conv1d(6, 5, 3, padding=1)
        self.norm = torch.nn.LayerNorm(5)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(2, dtype=torch.long))
        self.scale = torch.nn.Parameter(torch.tensor([1.5]))
        self.frozen = torch.nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.unused = torch.nn.Linear(7, 3)
        self.sometimes = torch.nn.Linear(5, 5)
        self.out = torch.nn.Linear(5, 6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, step: int) -> torch.Tensor:
        hidden = self.norm(self.conv(self.embed(tokens).transpose(1, 2)).transpose(1, 2)) * self.scale
        self.seen += torch.tensor([1, step])
        hidden = hidden + self.frozen(hidden)
        if step % 2 == 0 if self.alternates else step >= 4:
            hidden = hidden + self.sometimes(hidden)
        logits: torch.Tensor = self.head(torch.tanh(self.out(hidden)))
        return logits


def build(
    stage: int,
    dtype: str = "fp32",
    *,
    optimizer: str = "AdamW",
    offload: bool = False,
    steps: int = 1,
    alternates: bool = False,
    **zero: Any,
) -> Any:
    """Return an engine with an optimizer of two groups and a schedule."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"stage": stage, **zero}
    if offload:
        settings["offload_optimizer"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8 // world_size() // steps,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": 1.0,
        "zero_optimization": settings,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 0.01}},
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 14, "loss_scale_window": 2, "hysteresis": 1}
    net = Net(alternates=alternates)
    chosen = optimizer_of(net, optimizer)
    engine, *_ = deepspeed.initialize(model=net, optimizer=chosen, config=config)
    return engine


def optimizer_of(net: Net, kind: str = "AdamW") -> torch.optim.Optimizer:
    """Return an optimizer of two groups."""
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(groups, lr=0.01, **options)
    return optimizer


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def rank() -> int:
    return int(os.environ["RANK"])


def train(engine: Any, steps: int) -> list[float]:
    """Train up to a step. A step uses the same rows with any number of processes."""
    losses = []
    while engine.global_steps < steps:
        step = engine.global_steps
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 11, (8, 4), generator=generator)
        micro = engine.gradient_accumulation_steps()
        rows = tokens.chunk(world_size() * micro)[rank() * micro : (rank() + 1) * micro]
        for part in rows:
            logits = engine(part, step)
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), part.flatten())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def state(engine: Any) -> dict[str, Any]:
    """Return the whole state of an engine on every process. DeepSpeed's own functions gather it."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    gathered: dict[str, Any] = {"counters": [engine.global_steps, engine.global_samples, engine.skipped_steps]}
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for name, tensor in engine.module.state_dict().items():
            gathered[f"model.{name}"] = tensor.detach().float().clone()
    optimizer = engine.optimizer
    basic = getattr(optimizer, "optimizer", optimizer)
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        optimizer._hp_optimizer_states_linked = False  # DeepSpeed links the states of only the first group
        optimizer._lazy_init_hp_params_optimizer_state()
    held: dict[str, Any] = next(iter(basic.state.values()), {})
    slots = [slot for slot, value in held.items() if isinstance(value, torch.Tensor) and value.dim()]
    for parameter, name in engine.param_names.items():
        if parameter.requires_grad and engine.zero_optimization_stage() > 0:
            gathered[f"fp32.{name}"] = safe_get_full_fp32_param(parameter)
            for slot in slots:
                gathered[f"{slot}.{name}"] = safe_get_full_optimizer_state(parameter, slot)
    gathered["step"] = sorted({float(its["step"]) for its in basic.state.values() if "step" in its})
    gathered["lr"] = [group["lr"] for group in basic.param_groups]
    gathered["scale"] = getattr(optimizer, "loss_scale", None)
    gathered["schedule"] = engine.lr_scheduler.state_dict() if engine.lr_scheduler else None
    return gathered


def save(engine: Any, directory: str | Path) -> None:
    ckptcore.save_checkpointables(directory, ours.checkpointables(engine), context=ours.with_engines(), overwrite=True)


def load(engine: Any, directory: str | Path) -> None:
    ckptcore.load_checkpointables(directory, into=ours.checkpointables(engine), context=ours.with_engines())


def compare(actual: dict[str, Any], expected: dict[str, Any], *, exact: bool = True) -> None:
    """Compare two results of `state`.

    Sums of gradients depend on the number of processes, so later states can be equal only approximately.
    """
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor) and not exact:
            torch.testing.assert_close(actual[name], value, msg=name, rtol=1e-3, atol=1e-3)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(actual[name], value), name
        elif None not in (value, actual[name]):  # without ZeRO, 32 bits have no loss scale
            assert actual[name] == value, (name, actual[name], value)


def save_and_resume(directory: Path, cases: list[Any]) -> None:
    """Train, save, and resume in another engine, for each case. A case is a name and the arguments of `build`."""
    for name, stage, dtype, options in cases:
        engine = build(stage, dtype, **options)
        train(engine, 3)
        save(engine, directory / name)
        saved = state(engine)
        other = build(stage, dtype, **options)
        load(other, directory / name)
        compare(state(other), saved)
        assert train(engine, 6) == train(other, 6), name
        later = state(engine)
        compare(state(other), later)
        if rank() == 0:
            torch.save((saved, later), directory / f"{name}.pt")
            print("resumed", name, flush=True)


def load_elsewhere(directory: Path, pairs: list[Any], plain: list[str]) -> None:
    """Load into engines with other stages, and continue the training, for each pair.

    Args:
        directory: the directory of `save_and_resume`.
        pairs: pairs of a checkpoint's name and the arguments of `build`.
        plain: names of checkpoints to load into objects of PyTorch as well.
    """
    load_plainly(directory, plain)
    for name, stage, dtype, options in pairs:
        saved, later = torch.load(directory / f"{name}.pt", weights_only=False)
        engine = build(stage, dtype, **options)
        load(engine, directory / name)
        loaded = state(engine)
        common = saved.keys() & loaded.keys()
        print("loaded", name, stage, options, flush=True)
        compare({key: loaded[key] for key in common}, {key: saved[key] for key in common})
        if dtype != "fp32" or stage == 0 or "fp32.embed.weight" not in saved:
            # Dtypes of 16 bits are rounded differently. Without ZeRO, parameters without a gradient are not updated.
            continue
        train(engine, 6)
        loaded = state(engine)
        common = [key for key in later.keys() & loaded.keys() if key != "step"]
        compare({key: loaded[key] for key in common}, {key: later[key] for key in common}, exact=False)


def load_plainly(directory: Path, names: list[str]) -> None:
    """Load into objects of PyTorch."""
    for name in names:
        saved, _ = torch.load(directory / f"{name}.pt", weights_only=False)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name[:4]]
        net = Net(alternates=False).to(dtype)
        optimizer = optimizer_of(net)
        into = {"model": net, "optimizer": NamedOptimizer(net, optimizer)}
        ckptcore.load_checkpointables(directory / name, into=into)
        for weight, tensor in net.state_dict().items():
            assert torch.equal(tensor.float(), saved[f"model.{weight}"]), weight
        for weight, parameter in net.named_parameters():
            for slot in ("exp_avg", "exp_avg_sq") if f"exp_avg.{weight}" in saved else ():
                assert torch.equal(optimizer.state[parameter][slot], saved[f"{slot}.{weight}"]), (slot, weight)


def refusals(directory: Path) -> None:
    """Check that engines whose state cannot be saved are refused."""
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    layers = [torch.nn.Linear(2, 2)]
    pipeline = deepspeed.PipelineModule(layers=layers, num_stages=1, loss_fn=torch.nn.MSELoss())
    engine, *_ = deepspeed.initialize(model=pipeline, model_parameters=pipeline.parameters(), config=config)
    expect_refusal("PipelineEngine", lambda: ours.checkpointables(engine))
    hpz = build(3, zero_hpz_partition_size=2)
    expect_refusal("zero_hpz_partition_size", lambda: ours.checkpointables(hpz))
    never = {"zero_hpz_partition_size": 2}
    expect_refusal("zero_hpz_partition_size", lambda: AcceleratedRun(directory, 3, zero=never))
    run = TrainerRun(directory, 3, zero=never)
    expect_refusal("zero_hpz_partition_size", lambda: run.train(6))
    assert not (directory / "run" / "checkpoint-2").exists()


def warning_about_gradients(directory: Path) -> None:
    """Save during an accumulation of gradients, and after it."""
    logged = logging.handlers.BufferingHandler(100)
    logging.getLogger("ckptcore.integrations.deepspeed").addHandler(logged)
    engine = build(2, steps=2)
    for number in range(2):
        tokens = torch.zeros(2, 4, dtype=torch.long)
        engine.backward(engine(tokens, 0).sum())
        engine.step()
        save(engine, directory / "checkpoint")
        assert [record.levelname for record in logged.buffer] == ["WARNING"], number
    assert "gradients of some micro batches" in logged.buffer[0].getMessage()
    assert ckptcore.load(directory / "checkpoint" / "engine")["micro_steps"] == 2


def expect_refusal(name: str, call: Callable[[], object]) -> None:
    try:
        call()
    except NotImplementedError as error:
        assert name in str(error), error
        assert "engine.save_checkpoint(directory)" in str(error), error
    else:
        raise AssertionError(f"{name} was not refused")


class BareRun:
    """A run of an engine without a trainer. Saves every second step."""

    def __init__(self, directory: Path, stage: int, dtype: str = "bf16", **options: Any) -> None:
        self.directory = directory / "checkpoint"
        self.engine = build(stage, dtype, **options)

    def train(self, steps: int) -> list[float]:
        losses = []
        while self.engine.global_steps < steps:
            losses += train(self.engine, self.engine.global_steps + 1)
            if self.engine.global_steps % 2 == 0:
                keep_state(self, self.directory.parent, losses)
                ckptcore.save_checkpointables(
                    self.directory,
                    ours.checkpointables(self.engine),
                    context=ours.with_engines(),
                    overwrite=True,
                    strategy=added_files.SaveWithFiles(files={}),
                )
        return losses

    def resume(self) -> None:
        load(self.engine, self.directory)
        self.loaded = self.state()

    def state(self) -> dict[str, Any]:
        return state(self.engine)


class AcceleratedRun:
    """A run of an Accelerator with the plugin for DeepSpeed. Saves every second step."""

    def __init__(
        self,
        directory: Path,
        stage: int,
        *,
        dummies: bool = True,
        ours: bool = True,
        in_background: bool = False,
        zero: dict[str, Any] | None = None,
    ) -> None:
        from accelerate import Accelerator, DeepSpeedPlugin
        from accelerate.utils import DummyOptim, DummyScheduler, ProjectConfiguration
        from ckptcore_integrations.accelerate import CheckpointMixin

        accept_cpus()
        self.directory = directory
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 8 // world_size(),
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": stage, **(zero or {})},
            "bf16": {"enabled": True},
        }
        if dummies:
            config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
            config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 0.01}}
        kind: Any = type("Checkpointed", (CheckpointMixin, Accelerator), {}) if ours else Accelerator
        self.accelerator = kind(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
            project_config=ProjectConfiguration(str(directory), automatic_checkpoint_naming=True),
        )
        self.accelerator.save_in_background = in_background
        torch.manual_seed(0)
        net = Net(alternates=False)
        if dummies:
            optimizer: Any = DummyOptim(net.parameters(), lr=0.01)
            scheduler: Any = DummyScheduler(optimizer, warmup_num_steps=20)
        else:
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.engine, self.optimizer, self.scheduler = self.accelerator.prepare(net, optimizer, scheduler)

    def train(self, steps: int) -> list[float]:
        losses: list[float] = []
        while self.engine.global_steps < steps:
            step = self.engine.global_steps
            tokens = torch.randint(0, 11, (8, 4), generator=torch.Generator().manual_seed(step))
            part = tokens.chunk(world_size())[rank()]
            loss = torch.nn.functional.cross_entropy(self.engine(part, step).float().flatten(0, 1), part.flatten())
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
            if (step + 1) % 2 == 0:
                keep_state(self, self.directory, losses)
                self.accelerator.save_state()
        return losses

    def resume(self) -> None:
        self.accelerator.load_state()
        self.loaded = self.state()

    def state(self) -> dict[str, Any]:
        return {**state(self.engine), "scheduler": self.scheduler.state_dict()}


class TrainerRun:
    """A run of a Trainer with a configuration for DeepSpeed. Trains 6 steps and saves every second step."""

    def __init__(
        self,
        directory: Path,
        stage: int,
        *,
        ours: bool = True,
        scheduler: bool = False,
        gather: bool = True,
        adapters: bool = False,
        zero: dict[str, Any] | None = None,
        **given: Any,
    ) -> None:
        from ckptcore_integrations.transformers import CheckpointMixin
        from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

        accept_cpus()
        self.directory = directory
        self.losses: list[float] = []
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": gather, **(zero or {})},
        }
        if scheduler:
            config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}
            config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}}
        run = self
        self.loaded: dict[str, Any] = {}

        class Observed(Trainer):
            def training_step(self, *args: Any, **kwargs: Any) -> Any:
                loss = super().training_step(*args, **kwargs)
                run.losses.append(float(loss))
                return loss

        class Keep(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step % 2 == 0:
                    keep_state(run, directory, run.losses)

            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                run.loaded = run.state()

        torch.manual_seed(0)
        sizes: Any = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        sizes |= {"vocab_size": 17, "num_labels": 10}
        model: Any = BertForSequenceClassification(BertConfig(**sizes))
        if adapters:
            from peft import LoraConfig, get_peft_model  # slow

            lora = LoraConfig(
                r=2, target_modules=["query", "value"], modules_to_save=["classifier"], task_type="SEQ_CLS"
            )
            model = get_peft_model(model, lora)
        rows = [{"input_ids": torch.randint(0, 17, (12,)), "labels": number % 10} for number in range(64)]
        kind: Any = type("Checkpointed", (CheckpointMixin, Observed), {}) if ours else Observed
        arguments = TrainingArguments(
            str(directory / "run"),
            deepspeed=config,
            report_to=[],
            disable_tqdm=True,
            learning_rate=1e-2,
            **{
                "max_steps": 6,
                "save_steps": 2,
                "per_device_train_batch_size": 8 // world_size() // given.get("gradient_accumulation_steps", 1),
                **given,
            },
        )
        self.trainer = kind(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:16], callbacks=[Keep()])

    @property
    def engine(self) -> Any:
        return self.trainer.model_wrapped

    def train(self, steps: int) -> list[float]:
        self.trainer.train(resume_from_checkpoint=getattr(self, "newest", None))
        assert self.trainer.state.global_step == steps
        return self.losses

    def resume(self) -> None:
        self.newest = str(self.directory / "run" / "checkpoint-4")

    def state(self) -> dict[str, Any]:
        return {**state(self.engine), "scheduler": self.trainer.lr_scheduler.state_dict()}


def accept_cpus() -> None:
    """Make Accelerate use all processes of a job on CPUs. With DeepSpeed, it would count only accelerators."""
    from accelerate.state import DistributedType, PartialState

    PartialState._prepare_backend = lambda self, *_: ("gloo", DistributedType.MULTI_CPU)


def keep_state(run: Any, directory: Path, losses: list[float]) -> None:
    """Write the state and the losses to a file, with which `resume` compares."""
    current = run.state()
    directory.mkdir(parents=True, exist_ok=True)
    torch.save((current, losses), directory / f"state-{run.engine.global_steps}-{rank()}.pt")


RUNS: dict[str, Any] = {"bare": BareRun, "accelerate": AcceleratedRun, "trainer": TrainerRun}


def train_until_killed(directory: Path, kind: str, stage: int, options: dict[str, Any]) -> None:
    """Train 6 steps. In the third save, kill the first process after its files are written, before the commit."""
    kill_before_commit(directory / "state-6-0.pt", directory / "written")
    RUNS[kind](directory, stage, **options).train(6)


def train_to_end(directory: Path, kind: str, stage: int, options: dict[str, Any]) -> None:
    """Train 6 steps, with three saves."""
    RUNS[kind](directory, stage, **options).train(6)


def train_to_the_best(directory: Path, stage: int, options: dict[str, Any]) -> None:
    """Train 6 steps with the Trainer, which then loads the step with the highest loss."""
    run = TrainerRun(directory, stage, **options)
    run.train(6)
    best = run.trainer.state.best_global_step
    assert best < 6
    kept, _ = torch.load(directory / f"state-{best}-{rank()}.pt", weights_only=False)
    current = run.state()
    names = [name for name in kept if name.startswith(("model.", "fp32."))]
    compare({name: current[name] for name in names}, {name: kept[name] for name in names})


def resume(directory: Path, kind: str, stage: int, options: dict[str, Any]) -> None:
    """Resume from the second save, and compare the state after 6 steps with that of the earlier run."""
    run = RUNS[kind](directory, stage, **options)
    (loaded, _), (expected, losses) = (
        torch.load(directory / f"state-{step}-{rank()}.pt", weights_only=False) for step in (4, 6)
    )
    run.resume()
    later_losses = run.train(6)
    assert later_losses == losses[-len(later_losses) :]
    assert len(later_losses) == len(losses) // 3
    compare(run.loaded, loaded)
    compare(run.state(), expected)


def resume_elsewhere(directory: Path, kind: str, stage: int, options: dict[str, Any]) -> None:
    """Resume from the second save of a job that had another number of processes, and continue the training."""
    run = RUNS[kind](directory, stage, **options)
    loaded, _ = torch.load(directory / "state-4-0.pt", weights_only=False)
    run.resume()
    run.train(6)
    common = loaded.keys() & run.loaded.keys()
    compare({name: run.loaded[name] for name in common}, {name: loaded[name] for name in common})


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    deepspeed.init_distributed("gloo", verbose=False)
    globals()[arguments[0]](Path(arguments[1]), *arguments[2:])
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
