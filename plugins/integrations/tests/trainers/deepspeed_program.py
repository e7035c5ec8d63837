"""Programs that train with DeepSpeed on CPUs, in each process of a job, for `test_deepspeed`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from ckptcore_integrations import deepspeed as ours

import ckptcore

torch.set_num_threads(1)


class Net(torch.nn.Module):
    """Parameters of several shapes; some are frozen, tied, unused, or have no gradient in some steps."""

    def __init__(self, *, alternates: bool) -> None:
        super().__init__()
        self.alternates = alternates  # whether a layer is used in every second step, or from step 4 on
        self.embed = torch.nn.Embedding(11, 6)
        self.conv = torch.nn.Conv1d(6, 5, 3, padding=1)
        self.norm = torch.nn.LayerNorm(5)
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
        return self.head(torch.tanh(self.out(hidden)))


def build(
    stage: int, dtype: str = "fp32", *, offload: bool = False, steps: int = 1, alternates: bool = False, **zero: Any
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
    trained = {name: parameter for name, parameter in net.named_parameters() if parameter.requires_grad}
    groups = [
        {"params": [parameter for parameter in trained.values() if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in trained.values() if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    return engine


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def rank() -> int:
    return int(os.environ["RANK"])


def train(engine: Any, steps: int) -> list[float]:
    """Train to a number of steps. A step has the same rows on any number of processes."""
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
    """Return the whole state of an engine by DeepSpeed's own functions, on every process."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: dict[str, Any] = {"counters": [engine.global_steps, engine.global_samples, engine.skipped_steps]}
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for name, tensor in engine.module.state_dict().items():
            found[f"model.{name}"] = tensor.detach().float().clone()
    optimizer = engine.optimizer
    basic = getattr(optimizer, "optimizer", optimizer)
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        optimizer._hp_optimizer_states_linked = False  # DeepSpeed does it for the first group only
        optimizer._lazy_init_hp_params_optimizer_state()
    for parameter, name in engine.param_names.items():
        if parameter.requires_grad and engine.zero_optimization_stage() > 0:
            found[f"fp32.{name}"] = safe_get_full_fp32_param(parameter)
            for slot in ("exp_avg", "exp_avg_sq") if any(basic.state.values()) else ():
                found[f"{slot}.{name}"] = safe_get_full_optimizer_state(parameter, slot)
    found["step"] = sorted({float(slots["step"]) for slots in basic.state.values() if slots})
    found["lr"] = [group["lr"] for group in basic.param_groups]
    found["scale"] = getattr(optimizer, "loss_scale", None)
    found["schedule"] = engine.lr_scheduler.state_dict()
    return found


def save(engine: Any, directory: str | Path) -> None:
    ckptcore.save_checkpointables(directory, ours.checkpointables(engine), context=ours.with_engines(), overwrite=True)


def load(engine: Any, directory: str | Path) -> None:
    ckptcore.load_checkpointables(directory, into=ours.checkpointables(engine), context=ours.with_engines())


def start() -> None:
    deepspeed.init_distributed("gloo", verbose=False)


def compare(found: dict[str, Any], expected: dict[str, Any], *, exact: bool = True) -> None:
    """Compare states of `state`. Sums of gradients depend on the number of processes, so later states are close."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor) and not exact:
            torch.testing.assert_close(found[name], value, msg=name, rtol=1e-3, atol=1e-3)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
        elif None not in (value, found[name]):  # without ZeRO, 32 bits have no loss scale
            assert found[name] == value, (name, found[name], value)


def save_and_resume(directory: Path, cases: list[Any]) -> None:
    """Train, save, and resume in another engine, for each case: its name, and the arguments of `build`."""
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


def load_elsewhere(directory: Path, pairs: list[Any]) -> None:
    """Load into engines of other stages, and train on, for each pair: a name, and the arguments of `build`."""
    for name, stage, dtype, options in pairs:
        saved, later = torch.load(directory / f"{name}.pt", weights_only=False)
        engine = build(stage, dtype, **options)
        load(engine, directory / name)
        found = state(engine)
        common = saved.keys() & found.keys()
        print("loaded", name, stage, options, flush=True)
        compare({key: found[key] for key in common}, {key: saved[key] for key in common})
        if stage == 0 or "fp32.embed.weight" not in saved:
            continue  # without ZeRO, parameters without a gradient are not stepped
        train(engine, 6)
        found = state(engine)
        common = [key for key in later.keys() & found.keys() if key != "step"]
        compare({key: found[key] for key in common}, {key: later[key] for key in common}, exact=False)


if __name__ == "__main__":
    start()
    arguments = json.loads(sys.argv[1])
    globals()[arguments[0]](Path(arguments[1]), *arguments[2:])
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
