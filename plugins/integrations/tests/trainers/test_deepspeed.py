"""DeepSpeed on CPUs, alone, in Accelerate and in the Trainer: kills and resumes, changed stages, and jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptcore_integrations.transformers import export_pretrained
from ckptcore_testing.servers import free_port
from safetensors.torch import load_file
from transformers import BertForSequenceClassification

import ckptcore
from tests.docs.pages import code_blocks
from tests.docs.running import run_program

pytestmark = pytest.mark.system
PROGRAM = Path(__file__).with_name("deepspeed_program.py")


def environment(processes: int, port: int, *, rank: int) -> dict[str, str]:
    """Return the variables that a launcher sets."""
    return {
        "DS_ACCELERATOR": "cpu",
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join([str(PROGRAM.parent), *sys.path]),
        "RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "MASTER_PORT": str(port),
    }


def run_job(processes: int, function: str, directory: Path, *arguments: Any, killed: bool = False) -> None:
    """Call a function of the program in each process of a job. With `killed`, the first process must be killed."""
    port = free_port()
    call = json.dumps([function, str(directory), *arguments])
    outputs = [directory / f"output-{rank}.txt" for rank in range(processes)]
    jobs = []
    for rank, output in enumerate(outputs):
        variables = {**os.environ, **environment(processes, port, rank=rank)}
        with output.open("w") as file:
            jobs.append(
                subprocess.Popen([sys.executable, PROGRAM, call], env=variables, stdout=file, stderr=subprocess.STDOUT)
            )
    try:
        code = jobs[0].wait()
        if not killed and code == 0:
            codes = [job.wait() for job in jobs]
            assert not any(codes), "\n".join(output.read_text() for output in outputs)
        else:
            assert killed, outputs[0].read_text()
            assert code == -signal.SIGKILL, outputs[0].read_text()
    finally:
        for job in jobs:
            job.kill()
            job.wait()


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.brings("engine with ZeRO 1 to 3", "deepspeed", "same")
@pytest.mark.brings("Accelerator with ZeRO 1 to 3, also with `DummyOptim` and `DummyScheduler`", "deepspeed", "same")
@pytest.mark.brings("Trainer with ZeRO 1 to 3, also with adapters of PEFT", "deepspeed", "same")
@pytest.mark.parametrize(
    ("kind", "stage", "options"),
    [
        slow("bare", 2, {}),
        slow("bare", 1, {"dtype": "fp16", "alternates": True}),
        slow("bare", 3, {"dtype": "fp32", "steps": 2}),
        ("accelerate", 3, {}),
        slow("accelerate", 1, {"dummies": False}),
        slow("accelerate", 2, {"in_background": True}),
        ("trainer", 3, {}),
        slow("trainer", 2, {"scheduler": True}),
        slow("trainer", 1, {"gradient_accumulation_steps": 2}),
        slow("trainer", 2, {"adapters": True}),
        slow("trainer", 3, {"adapters": True}),
    ],
)
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, kind: str, stage: int, options: dict[str, Any]) -> None:
    run_job(2, "train_until_killed", tmp_path, kind, stage, options, killed=True)
    assert "/optimizer/" in (tmp_path / "written").read_text()  # the kill happened during the save
    run_job(2, "resume", tmp_path, kind, stage, options)
    if "adapters" in options:
        directory = tmp_path / "run" / "checkpoint-6"
        kept, _ = torch.load(tmp_path / "state-6-0.pt", weights_only=False)
        written = load_file(directory / "adapter_model.safetensors")
        names = {name.replace(".default", "").replace(".modules_to_save", ""): name for name in kept}
        assert any("lora_A" in name for name in written)
        assert any("classifier" in name for name in written)
        for name, tensor in written.items():
            assert torch.equal(tensor, kept[names[f"model.{name}"]]), name
        assert not any("embeddings" in name for name in ckptcore.load(directory / "model"))
    elif kind == "trainer":
        expect_weights(tmp_path / "run" / "checkpoint-6", tmp_path)


def expect_weights(directory: Path, expected: Path) -> None:
    """Compare a model of Transformers with the state that the program kept at step 6."""
    model = BertForSequenceClassification.from_pretrained(directory)
    kept, _ = torch.load(expected / "state-6-0.pt", weights_only=False)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, kept[f"model.{name}"]), name


@pytest.mark.slow
def test_weights_that_were_not_gathered_are_exported(tmp_path: Path) -> None:
    run_job(2, "train_to_end", tmp_path, "trainer", 3, {"gather": False})
    directory = tmp_path / "run" / "checkpoint-6"
    assert not (directory / "model.safetensors.index.json").exists()
    export_pretrained(directory, tmp_path / "published")
    expect_weights(tmp_path / "published", tmp_path)


@pytest.mark.slow
def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    evaluated = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    options = {**evaluated, "metric_for_best_model": "loss", "greater_is_better": True, "save_total_limit": 1}
    run_job(2, "train_to_the_best", tmp_path, 3, options)


CASES: Any = [
    *((f"{dtype}-{stage}", stage, dtype, {}) for dtype in ("fp32", "bf16", "fp16") for stage in (0, 1, 2, 3)),
    *((f"bf16-{stage}-alternating", stage, "bf16", {"alternates": True}) for stage in (0, 1, 2)),
    ("bf16-3-momentum", 3, "bf16", {"optimizer": "SGD"}),
    ("fp32-1-offloaded", 1, "fp32", {"offload": True}),
    ("bf16-2-offloaded", 2, "bf16", {"offload": True, "steps": 2, "round_robin_gradients": True}),
    ("bf16-3-offloaded", 3, "bf16", {"offload": True, "steps": 2}),
    ("fp32-3-small-groups", 3, "fp32", {"stage3_param_persistence_threshold": 0, "sub_group_size": 40}),
    ("fp32-3-parameters-offloaded", 3, "fp32", {"offload": True, "offload_param": {"device": "cpu"}}),
    ("bf16-2-aligned", 2, "bf16", {"parameter_alignment": True}),
]
"""Cases: a name, the stage of ZeRO, the dtype, and options."""


@pytest.mark.brings("engine with ZeRO 1 to 3, into another stage and another number of processes", "deepspeed", "same")
@pytest.mark.brings("parameters that are frozen, tied, unused, or without a gradient", "deepspeed", "same")
@pytest.mark.brings("optimizer of an engine, into a `NamedOptimizer` of PyTorch", "deepspeed", "same")
def test_another_stage_and_number_of_processes(tmp_path: Path) -> None:
    """A fast test with two of the pairs of the next test."""
    run_job(2, "save_and_resume", tmp_path, [CASES[1], CASES[7]])
    run_job(1, "load_elsewhere", tmp_path, [("fp32-1", 3, "fp32", {}), ("bf16-3", 2, "bf16", {})], ["fp32-1", "bf16-3"])


@pytest.mark.brings("engine with fp16 and a dynamic loss scale, bf16, and offload to the CPU", "deepspeed", "same")
@pytest.mark.slow
@pytest.mark.parametrize(("saved", "loaded", "stages_up"), [(1, 2, 1), (2, 1, 2), (2, 4, 3), (4, 2, 0)])
def test_all_stages_and_numbers_of_processes(tmp_path: Path, saved: int, loaded: int, stages_up: int) -> None:
    run_job(saved, "save_and_resume", tmp_path, CASES)
    pairs: Any = []
    for name, stage, dtype, options in CASES:
        same = {"optimizer": options["optimizer"]} if "optimizer" in options else {}
        pairs.append((name, (stage + stages_up) % 4, dtype, same))
    names = [name for name, _, _, options in CASES if "optimizer" not in options]
    run_job(loaded, "load_elsewhere", tmp_path, pairs, names)


@pytest.mark.brings("Trainer and Accelerator, into another stage and number of processes", "deepspeed", "same")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "saved", "loaded", "other_stage"),
    [
        ("accelerate", 2, 1, 2),
        ("accelerate", 4, 2, 3),
        ("accelerate", 2, 4, 1),
        ("trainer", 2, 1, 2),
        ("trainer", 4, 2, 3),
        ("trainer", 2, 4, 1),
    ],
)
def test_trainers_elsewhere(tmp_path: Path, kind: str, saved: int, loaded: int, other_stage: int) -> None:
    run_job(saved, "train_until_killed", tmp_path, kind, 3, {}, killed=True)
    run_job(loaded, "resume_elsewhere", tmp_path, kind, other_stage, {})


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stage"), [("accelerate", 2), ("trainer", 3)])
def test_files_of_deepspeed_are_loaded(tmp_path: Path, kind: str, stage: int) -> None:
    run_job(2, "train_to_end", tmp_path, kind, stage, {"ours": False})
    for path in tmp_path.glob("**/*[-_]6"):
        path.rename(tmp_path / "later")
    for path in tmp_path.glob("checkpoints/checkpoint_2"):
        path.rename(tmp_path / "later")
    assert list(tmp_path.rglob("*_optim_states.pt"))
    run_job(2, "resume", tmp_path, kind, stage, {})


@pytest.mark.brings("engine with pipeline parallelism, or ZeRO++", "deepspeed", "refused")
@pytest.mark.brings("Accelerator with ZeRO++", "deepspeed", "refused")
@pytest.mark.brings("Trainer with ZeRO++", "deepspeed", "refused")
def test_what_is_not_supported_is_refused_when_the_training_starts(tmp_path: Path) -> None:
    run_job(2, "refusals", tmp_path)


@pytest.mark.slow
def test_lost_gradients_give_a_warning(tmp_path: Path) -> None:
    run_job(2, "warning_about_gradients", tmp_path)


def test_the_program_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(1, free_port(), rank=0).items():
        monkeypatch.setenv(name, value)
    page = Path(__file__).parents[4] / "docs" / "how-to" / "with-deepspeed.md"
    blocks = [block for block in code_blocks(page.read_text(encoding="utf-8")) if block.language == "python"]
    for _ in range(2):  # the second run resumes
        run_program(blocks, tmp_path)
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.name.isdigit()) == ["10", "15", "20", "5"]
    ckptcore.copy(tmp_path / "run" / "20", tmp_path / "weights", subtree="model")
    assert load_file(tmp_path / "weights" / "model.safetensors").keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
