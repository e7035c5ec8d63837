"""Writes the golden checkpoints of DeepSpeed: ``python generate_deepspeed.py DIRECTORY [NAME ...]``.

The directory ``deepspeed`` contains checkpoints of DeepSpeed 0.19.8. A directory ``deepspeed_VERSION`` contains
checkpoints of that version, which was imported from its source distribution with torch 2.13. Its ``zero_to_fp32``
needs TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1. ZeRO 3 of 0.14.5 also calls ``numactl --hardware``; a script that prints one
node replaced this command.

DeepSpeed's own ``save_checkpoint`` writes each checkpoint on CPUs (gloo), and its ``ds_to_universal`` the universal
ones. For each, ``NAME.npz`` contains the weights that ``zero_to_fp32`` returns, and the optimizer state that
``deepspeed.utils.safe_get_full_optimizer_state`` returned before the save.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import numpy as np
import torch

CASES: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1, "dtype": "fp32", "processes": 3, "groups": 1},
    "zero1_bf16": {"stage": 1, "dtype": "bf16", "processes": 2, "accumulate": "fp32"},
    "zero2_bf16": {"stage": 2, "dtype": "bf16", "processes": 2, "groups": 1},
    "zero3": {"stage": 3, "dtype": "fp32", "processes": 3},
    "zero3_bf16": {"stage": 3, "dtype": "bf16", "processes": 2, "sub_group_size": 60},
    "no_zero": {"stage": 0, "dtype": "fp32", "processes": 1},
}
UNIVERSAL = {"universal_zero1": "zero1", "universal_zero3": "zero3_bf16"}


class Net(torch.nn.Module):
    """Parameters of several shapes, some of them frozen or tied, and buffers of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 6)
        self.conv = torch.nn.Conv1d(6, 5, 3, padding=1)
        self.norm = torch.nn.LayerNorm(5)
        self.register_buffer("mean", torch.linspace(0, 1, 5))
        self.register_buffer("seen", torch.arange(2))
        self.scale = torch.nn.Parameter(torch.tensor([1.5]))
        self.frozen = torch.nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.out = torch.nn.Linear(5, 6)
        self.head = torch.nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.conv(self.embed(tokens).transpose(1, 2)).transpose(1, 2)) * self.scale
        hidden = hidden + self.frozen(hidden)
        logits: torch.Tensor = self.head(torch.tanh(self.out(hidden)))
        return logits


def engine_of(net: Net, case: dict[str, Any]) -> Any:
    settings: dict[str, Any] = {"stage": case["stage"]}
    if "sub_group_size" in case:
        settings["sub_group_size"] = case["sub_group_size"]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": settings,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 0.01}},
    }
    if case["dtype"] != "fp32":
        config[case["dtype"]] = {"enabled": True}
    if "accumulate" in case:
        config["data_types"] = {"grad_accum_dtype": case["accumulate"]}
    trained = [(name, parameter) for name, parameter in net.named_parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [value for name, value in trained if value.ndim > 1], "weight_decay": 0.1},
        {"params": [value for name, value in trained if value.ndim < 2], "weight_decay": 0.0},
    ]
    if case.get("groups") == 1:
        groups = [{"params": [value for _, value in trained]}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    return deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]


def train_and_save(case: dict[str, Any], directory: Path) -> None:
    torch.manual_seed(0)
    engine = engine_of(Net(), case)
    for step in range(2):
        tokens = (torch.arange(8).reshape(2, 4) + step + engine.global_rank) % 7
        loss = torch.nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())
        engine.backward(loss)
        engine.step()
    state = {"epoch": 3, "note": "text", "seen": torch.arange(3)}
    if case["stage"] in (1, 2):
        # `ds_to_universal` needs this entry, also for a model without tensor parallelism.
        state["universal_checkpoint_info"] = {"universal_checkpoint_version": 0.2}
    engine.save_checkpoint(str(directory), tag="global_step2", client_state=state)
    expected: dict[str, Any] = {}
    if case["stage"] > 0:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                for kind in ("exp_avg", "exp_avg_sq"):
                    moment = safe_get_full_optimizer_state(parameter, kind)
                    expected[f"{kind}/{name}"] = moment.float().numpy()
                expected[f"fp32/{name}"] = safe_get_full_fp32_param(parameter).float().numpy()
    if engine.global_rank == 0:
        np.savez(directory.parent / f"{directory.name}.state.npz", **expected)
    torch.distributed.barrier()


def run_job(case: dict[str, Any], directory: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    jobs = []
    for rank in range(case["processes"]):
        variables = {
            "LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(case["processes"]),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        call = [sys.executable, __file__, "--rank", json.dumps([case, str(directory)])]
        jobs.append(subprocess.Popen(call, env={**os.environ, **variables}))
    if codes := [code for job in jobs if (code := job.wait())]:
        raise SystemExit(f"a process of {directory.name} failed: {codes}")


def add_expected(directory: Path) -> None:
    """Write the arrays that a reader must return."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with np.load(f"{directory}.state.npz") as states:
        expected = dict(states)
    Path(f"{directory}.state.npz").unlink()
    weights = {name: expected.pop(name) for name in list(expected) if name.startswith("fp32/")}
    if directory.name == "zero1_bf16":
        # In this version, `zero_to_fp32` rejects the files of the BF16_Optimizer, because they lack "zero_stage".
        expected.update({name.replace("fp32/", "module/"): array for name, array in weights.items()})
        np.savez_compressed(f"{directory}.npz", **expected)
    elif directory.name != "no_zero":
        for name, tensor in get_fp32_state_dict_from_zero_checkpoint(str(directory)).items():
            wide = tensor.float() if tensor.is_floating_point() else tensor
            expected[f"module/{name}"] = wide.detach().numpy()
        np.savez_compressed(f"{directory}.npz", **expected)
    for script in directory.glob("*.py"):
        script.unlink()


def convert(source: Path, directory: Path) -> None:
    from deepspeed.checkpoint.ds_to_universal import main

    target = directory / "global_step2_universal"
    main(
        Namespace(
            input_folder=str(source / "global_step2"), output_folder=str(target), num_extract_workers=1,
            num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
        )
    )  # fmt: skip


def main_of_directory(directory: Path, chosen: Sequence[str]) -> None:
    directory.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name, case in CASES.items():
            if (directory / name).exists() or name not in (chosen or CASES):
                continue
            run_job(case, Path(scratch) / name)
            add_expected(Path(scratch) / name)
            for path in Path(scratch).glob(f"{name}*"):
                if path.name in (name, f"{name}.npz"):
                    shutil.move(path, directory / path.name)
        for name, source in UNIVERSAL.items():
            if not (directory / name).exists() and name in (chosen or UNIVERSAL):
                convert(directory / source, directory / name)


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        case, target = json.loads(sys.argv[2])
        train_and_save(case, Path(target))
    else:
        main_of_directory(Path(sys.argv[1]), sys.argv[2:])
