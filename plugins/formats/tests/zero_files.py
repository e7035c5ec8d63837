"""Small checkpoints like those of DeepSpeed, for any number of processes. Only torch is needed to write them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

Shape = tuple[int, ...]
SHAPES: Sequence[Mapping[str, Shape]] = (
    {"w": (5, 3, 2), "empty": (0, 3), "one": (1,), "long": (7, 11)},
    {"b": (3,), "t": (2, 1, 3)},
)
"""The shapes of the parameters of two groups."""
FROZEN: Shape = (3, 5)
"""The shape of a frozen parameter, in float64."""
KINDS = {"fp32": 0.0, "exp_avg": 1000.0, "exp_avg_sq": 2000.0}


def array(name: str, shape: Shape, kind: str = "fp32") -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the elements of a parameter, or of its optimizer state."""
    start = KINDS[kind] + 100 * sum(map(ord, name))
    return (np.arange(math.prod(shape), dtype=np.float32) + start).reshape(shape)


def write_zero(
    directory: Path, stage: int, processes: int, shapes: Sequence[Mapping[str, Shape]] = SHAPES, align: int = 0
) -> Path:
    """Write ``global_step1`` of one data parallel job.

    Args:
        directory: the parent directory.
        stage: 1, 2 or 3.
        processes: the number of processes.
        shapes: the shapes of the parameters by name, for each group.
        align: padding after each parameter in the vectors of ZeRO 1 and 2, in elements.
    """
    step = directory / "global_step1"
    step.mkdir(parents=True)
    (directory / "latest").write_text("global_step1")
    model: dict[str, Any] = {
        "module": OrderedDict(
            [("buffer", torch.arange(3))]
            + [(name, torch.zeros(0 if stage == 3 else shape)) for group in shapes for name, shape in group.items()]
        ),
        "buffer_names": ["buffer"],
        "param_shapes": [
            OrderedDict((name, torch.Size(shape)) for name, shape in group.items()) for group in shapes
        ],
        "shared_params": {"tied": "w"},
        "frozen_param_shapes": {"frozen": torch.Size(FROZEN)} if stage > 1 else None,
        "dp_world_size": processes,
        "epoch": 3,
    }  # fmt: skip
    names = [f"zero_pp_rank_{rank}_" for rank in range(processes)] if stage == 3 else [""]
    frozen = torch.from_numpy(array("frozen", FROZEN)).double()
    model["module"]["frozen"] = frozen if stage < 3 else torch.zeros(0)
    for rank, prefix in enumerate(names):
        extent = -(-frozen.numel() // processes)
        part = torch.zeros(extent, dtype=torch.float64)
        held = frozen.reshape(-1)[rank * extent : (rank + 1) * extent]
        part[: len(held)] = held
        fragments = {1: None, 2: {"frozen": frozen}, 3: {"frozen": part}}
        model["frozen_param_fragments"] = fragments[stage]
        torch.save(model, step / f"{prefix}mp_rank_00_model_states.pt")
    for rank in range(processes):
        state = _state_3(shapes, processes, rank) if stage == 3 else _state_12(stage, shapes, processes, rank, align)
        torch.save({"optimizer_state_dict": state}, step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return step


def _state_12(
    stage: int, shapes: Sequence[Mapping[str, Shape]], processes: int, rank: int, align: int
) -> dict[str, Any]:
    flat: dict[str, list[torch.Tensor]] = {kind: [] for kind in KINDS}
    paddings = []
    for group in shapes:
        for kind in KINDS:
            padded = [np.append(array(name, shape, kind), [0] * align) for name, shape in group.items()]
            vector = np.concatenate(padded).astype(np.float32)
            extent = -(-len(vector) // (2 * processes)) * 2
            padding = extent * processes - len(vector)
            vector = np.append(vector, np.zeros(padding, np.float32))
            part = torch.from_numpy(vector[rank * extent : (rank + 1) * extent].copy())
            last = rank == processes - 1 and kind == "fp32"
            flat[kind].append(part[: max(extent - padding, 0)] if last else part)
        paddings.append([align] * len(group))
    return {
        "zero_stage": stage,
        "clip_grad": 1.0,
        "partition_count": [processes] * len(shapes),
        "single_partition_of_fp32_groups": flat["fp32"],
        "base_optimizer_state": _base(flat, [[number] for number in range(len(shapes))]),
        **({"param_alignment_paddings": paddings} if align else {}),
    }


def _state_3(shapes: Sequence[Mapping[str, Shape]], processes: int, rank: int) -> dict[str, Any]:
    flat: dict[str, list[torch.Tensor]] = {kind: [] for kind in KINDS}
    for group in shapes:
        for kind in KINDS:
            slices = []
            for name, shape in group.items():
                elements = array(name, shape, kind).reshape(-1)
                extent = -(-len(elements) // processes)
                padded = np.append(elements, np.zeros(extent * processes - len(elements), np.float32))
                slices.append(padded[rank * extent : (rank + 1) * extent])
            flat[kind].append(torch.from_numpy(np.concatenate(slices).astype(np.float32)))
    return {
        "zero_stage": 3,
        "partition_count": processes,
        "fp32_flat_groups": flat["fp32"],
        "optimizer_state_dict": _base(flat, [[number] for number in range(len(shapes))]),
    }


def _base(flat: Mapping[str, Sequence[torch.Tensor]], params: Sequence[Sequence[int]]) -> dict[str, Any]:
    count = len(flat["fp32"])
    return {
        "state": {
            number: {"step": torch.tensor(2.0), **{kind: flat[kind][number] for kind in ("exp_avg", "exp_avg_sq")}}
            for number in range(count)
        },
        "param_groups": [{"lr": 0.1, "params": list(numbers)} for numbers in params],
    }


def edit(path: Path, *keys: Any, value: Any = None) -> None:
    """Replace an entry of a file, or remove it if `value` is None."""
    content = torch.load(path, weights_only=False)
    target = content
    for key in keys[:-1]:
        target = target[key]
    if value is None:
        del target[keys[-1]]
    else:
        target[keys[-1]] = value(target[keys[-1]]) if callable(value) else value
    torch.save(content, path)
