"""Checkpoints of DeepSpeed: goldens load bit for bit, of any number of processes. Damaged ones raise errors."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ckptcore_formats.deepspeed import DeepSpeedLayout
from ckptcore_testing.arrays import same_bits
from safetensors.numpy import load_file, save_file

import ckptcore
from ckptcore.errors import CheckpointError, ChecksumError, CorruptCheckpointError, UnsupportedLeafError
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.opening.open_checkpoints import ConsistentRead, open_either
from plugins.formats.tests.zero_files import FROZEN, SHAPES, array, edit, write_zero

GOLDEN = Path(__file__).parent / "golden"
EXPECTED_OF = {"universal_zero1": "zero1", "universal_zero3": "zero3_bf16"}
GOLDENS = sorted(
    str(path.relative_to(GOLDEN)) for path in GOLDEN.glob("deepspeed*/*") if path.is_dir() and path.name != "no_zero"
)
OPTIM = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"


@pytest.mark.parametrize("name", GOLDENS)
def test_a_golden_equals_the_results_of_deepspeed(name: str) -> None:
    loaded = ckptcore.load(GOLDEN / name)
    path = GOLDEN / name
    with np.load(f"{path.with_name(EXPECTED_OF.get(path.name, path.name))}.npz") as expected:
        assert len(expected.files) > 20
        for key in expected.files:
            kind, _, parameter = key.partition("/")
            state = loaded["module"] if kind == "module" else loaded["optimizer"]["state"][parameter]
            stored = state[parameter if kind == "module" else kind]
            # zero_to_fp32 converts 16-bit buffers and frozen weights. ckptcore keeps the stored dtype.
            assert same_bits(stored.astype(expected[key].dtype), expected[key]), key
    groups = loaded["optimizer"]["param_groups"]
    assert sorted(name for group in groups for name in group["params"]) == sorted(loaded["optimizer"]["state"])
    assert groups[0]["betas"] == (0.9, 0.999)
    assert float(loaded["optimizer"]["state"]["embed.weight"]["step"]) == 2 if "universal_zero3" not in name else True
    assert (loaded["epoch"], loaded["note"], list(loaded["seen"])) == (3, "text", [0, 1, 2])
    assert loaded["lr_scheduler"] == {"last_batch_iteration": 1}
    assert list(loaded["module"])[:3] == ["scale", "mean", "seen"] and loaded["module"]["seen"].dtype == np.int64
    assert loaded["module"]["frozen.weight"].shape == (5, 5)


def test_tied_weights_are_stored_once() -> None:
    for name in GOLDENS:
        checkpoint = ConsistentRead(GOLDEN / name, ckptcore.Context(), open_either).open()
        assert isinstance(checkpoint, Checkpoint) and ckptcore.metadata(GOLDEN / name).layout == "deepspeed"
        numbers = {path: number for number, path in enumerate(checkpoint.tree.paths)}
        tied, first = numbers["module", "head.weight"], numbers["module", "embed.weight"]
        assert checkpoint.tree.aliases[tied] == first, name


def test_a_step_and_its_parent_are_the_same_checkpoint() -> None:
    parent = GOLDEN / "deepspeed" / "zero2_bf16"
    first, second = ckptcore.load(parent), ckptcore.load(parent / "global_step2")
    assert (
        same_bits(first["module"]["conv.weight"], second["module"]["conv.weight"]) and first["epoch"] == second["epoch"]
    )


def test_without_zero_one_file_has_the_whole_state() -> None:
    loaded = ckptcore.load(GOLDEN / "deepspeed" / "no_zero")
    assert loaded["module"]["embed.weight"].shape == (7, 6) and loaded["optimizer"]["param_groups"][0]["lr"] > 0


@pytest.mark.parametrize("processes", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_files_of_any_number_of_processes_load(stage: int, processes: int, tmp_path: Path) -> None:
    write_zero(tmp_path, stage, processes, align=processes % 3 if stage < 3 else 0)
    loaded = ckptcore.load(tmp_path)
    for group in SHAPES:
        for name, shape in group.items():
            assert same_bits(loaded["module"][name], array(name, shape)), name
            for kind in ("exp_avg", "exp_avg_sq"):
                assert same_bits(loaded["optimizer"]["state"][name][kind], array(name, shape, kind)), name
            assert loaded["optimizer"]["state"][name]["step"] == 2
    assert [group["params"] for group in loaded["optimizer"]["param_groups"]] == [list(group) for group in SHAPES]
    assert same_bits(loaded["module"]["tied"], loaded["module"]["w"])
    assert same_bits(loaded["module"]["frozen"], array("frozen", FROZEN).astype(np.float64))
    assert list(loaded["module"]["buffer"]) == [0, 1, 2]


def test_lists_of_states_in_elastic_checkpoints(tmp_path: Path) -> None:
    step = write_zero(tmp_path, 2, 3)
    for rank in range(3):
        path = step / OPTIM.replace("rank_0_", f"rank_{rank}_")
        edit(path, "optimizer_state_dict", "base_optimizer_state", value=lambda base: list(base["state"].values()))
        edit(path, "optimizer_state_dict", "base_optimizer_state_step", value=5)
    loaded = ckptcore.load(tmp_path)["optimizer"]
    assert same_bits(loaded["state"]["long"]["exp_avg"], array("long", (7, 11), "exp_avg"))
    assert loaded["param_groups"] == [] and loaded["base_optimizer_state_step"] == 5


@pytest.mark.parametrize(("stage", "file"), [(2, OPTIM), (2, OPTIM.replace("rank_0_", "rank_2_")), (3, OPTIM),
                                             (3, "zero_pp_rank_1_mp_rank_00_model_states.pt"),
                                             (3, "zero_pp_rank_2_mp_rank_00_optim_states.pt")])  # fmt: skip
def test_a_missing_rank_is_named(stage: int, file: str, tmp_path: Path) -> None:
    step = write_zero(tmp_path, stage, 3)
    (step / file).unlink()
    with pytest.raises(CorruptCheckpointError, match=file.replace(".", r"\.")) as caught:
        ckptcore.load(step)
    assert caught.value.key == file
    with pytest.raises(CorruptCheckpointError, match=file.replace(".", r"\.")):
        ckptcore.load(tmp_path)


def test_the_error_for_a_missing_file_of_the_model(tmp_path: Path) -> None:
    step = write_zero(tmp_path, 2, 2)
    (step / MODEL).unlink()
    with pytest.raises(CorruptCheckpointError, match="mp_rank_00_model_states"):
        ckptcore.load(step)


def test_the_file_of_another_save_is_refused(tmp_path: Path) -> None:
    step = write_zero(tmp_path, 2, 2)
    shutil.copy(step / OPTIM, step / OPTIM.replace("rank_0_", "rank_2_"))
    with pytest.raises(CorruptCheckpointError, match="2 partitions, but 3 ranks"):
        ckptcore.load(step)


FLAT = ("optimizer_state_dict", "single_partition_of_fp32_groups")
STATE = ("optimizer_state_dict", "base_optimizer_state", "state")
HOSTILE: dict[str, tuple[str, tuple[Any, ...], Any, str]] = {
    "short partition": (OPTIM, (*FLAT, 0), lambda tensor: tensor[:-7].clone(), "have 101, and .* describes 108"),
    "long partition": (OPTIM, (*FLAT, 0), lambda tensor: torch.cat([tensor, tensor]), "another checkpoint or damaged"),
    "no partitions": (OPTIM, FLAT, None, "no partitions of weights in fp32"),
    "no list": (OPTIM, FLAT, {"a": 3}, "no list of tensors"),
    "fewer groups": (OPTIM, FLAT, lambda groups: groups[:1], "different numbers of groups"),
    "another dtype": (OPTIM, (*FLAT, 0), lambda tensor: tensor.double(), "partitions of 2 dtypes"),
    "no optimizer": (OPTIM, ("optimizer_state_dict",), None, "no partitions"),
    "no shapes": (MODEL, ("param_shapes",), None, "number of groups"),
    "negative shape": (MODEL, ("param_shapes", 0, "w"), (-5, 3, 2), "no valid shape"),
    "huge shape": (MODEL, ("param_shapes", 0, "w"), (1 << 61, 1 << 61), "no valid shape"),
    "text as shape": (MODEL, ("param_shapes", 0, "w"), "five", "no valid shape"),
    "more elements": (MODEL, ("param_shapes", 0, "w"), (50, 3, 2), "another checkpoint or damaged"),
    "no groups": (MODEL, ("param_shapes",), 5, "valid shapes of parameters"),
    "paddings": (OPTIM, ("optimizer_state_dict", "param_alignment_paddings"), [[1], [1]], "no valid paddings"),
    "short state": (OPTIM, (*STATE, 0, "exp_avg"), lambda tensor: tensor[:-7].clone(), "exp_avg"),
    "no state of a rank": (OPTIM.replace("_0_", "_1_", 1), (*STATE, 0, "exp_avg"), None, "no tensor in the file"),
    "state of a partition": (OPTIM, (*STATE, 0, "exp_avg"), lambda _: torch.zeros(2, 3), "whole partition"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_damage_is_refused_with_a_reason(case: str, tmp_path: Path) -> None:
    file, keys, value, reason = HOSTILE[case]
    step = write_zero(tmp_path, 2, 2)
    edit(step / file, *keys, value=value)
    with pytest.raises(CheckpointError, match=reason):
        ckptcore.load(step)


def test_a_damaged_state_leaves_the_weights_readable(tmp_path: Path) -> None:
    step = write_zero(tmp_path, 2, 2)
    edit(step / OPTIM, *STATE, 0, "exp_avg", value=lambda tensor: tensor[:-7].clone())
    loaded = ckptcore.load(step, select=ckptcore.select.names("module"))
    assert same_bits(loaded["module"]["long"], array("long", (7, 11)))


def test_odd_items_in_lists_of_names_are_ignored(tmp_path: Path) -> None:
    step = write_zero(tmp_path, 2, 2)
    edit(step / MODEL, "buffer_names", value=[{"a": 1}, ({},), 3, "buffer"])
    edit(step / MODEL, "shared_params", value={"tied": {"a": 1}, "other": ({},), 3: "w"})
    assert same_bits(ckptcore.load(step)["module"]["w"], array("w", (5, 3, 2)))


def test_state_that_differs_between_processes_is_an_error(tmp_path: Path) -> None:
    step = write_zero(tmp_path, 3, 2)
    edit(step / "zero_pp_rank_1_mp_rank_00_model_states.pt", "epoch", value=4)
    with pytest.raises(UnsupportedLeafError, match="epoch.* differs between the processes"):
        ckptcore.load(step)
    assert ckptcore.load(step, select=ckptcore.select.names("module"))["module"]["w"].shape == (5, 3, 2)
    # The remedy: each file loads by its own path.
    assert ckptcore.load(step / "zero_pp_rank_1_mp_rank_00_model_states.pt")["epoch"] == 4


RANK_1 = OPTIM.replace("rank_0_", "rank_1_")
DIFFERING: dict[str, tuple[int, tuple[Any, ...], Any, str]] = {
    "step": (2, (*STATE, 0, "step"), torch.tensor(9.0), "state/w/step.* differs between the processes"),
    "rate": (3, ("optimizer_state_dict", "optimizer_state_dict", "param_groups", 0, "lr"), 0.7, "groups.*lr.* differs"),
    "groups": (2, (*STATE[:2], "param_groups"), [], "stored differently by the processes"),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFERING)
def test_options_of_the_optimizer_that_differ_are_refused(case: str, tmp_path: Path) -> None:
    stage, keys, value, reason = DIFFERING[case]
    step = write_zero(tmp_path, stage, 2)
    edit(step / RANK_1, *keys, value=value)
    with pytest.raises(UnsupportedLeafError, match=reason):
        ckptcore.load(step)
    assert ckptcore.load(step, select=ckptcore.select.names("module"))["module"]["w"].shape == (5, 3, 2)


def test_optimizer_state_of_only_one_process_is_an_error(tmp_path: Path) -> None:
    step = write_zero(tmp_path, 2, 2)
    edit(step / OPTIM, *STATE, 1)
    with pytest.raises(CheckpointError, match=r"optimizer/state/b/exp_avg.*no tensor in the file"):
        ckptcore.load(step)
    edit(step / RANK_1, *STATE, 1)  # no process has this state, as for frozen weights
    assert "b" not in ckptcore.load(step)["optimizer"]["state"]


@pytest.mark.parametrize("states", [[{}], [{}] * 3])
def test_a_list_of_states_must_match_the_groups(states: list[Any], tmp_path: Path) -> None:
    step = write_zero(tmp_path, 2, 2)
    edit(step / RANK_1, *STATE[:2], value=states)
    with pytest.raises(CorruptCheckpointError, match=rf"{RANK_1}.* have {len(states)}, and .* describes 2"):
        ckptcore.load(step)


def test_names_are_never_used_as_paths(tmp_path: Path) -> None:
    name = "../../etc/passwd"
    write_zero(tmp_path, 2, 2, [{name: (3, 2)}])
    assert same_bits(ckptcore.load(tmp_path)["module"][name], array(name, (3, 2)))
    (tmp_path / "latest").write_text("../global_step1")
    with pytest.raises(CheckpointError):
        ckptcore.load(tmp_path)


@pytest.mark.parametrize("file", ["layer_00-model_states.pt", "layer_0_expert_1_mp_rank_00_model_states.pt",
                                  "mp_rank_01_model_states.pt"])  # fmt: skip
def test_the_error_for_other_parallelism_names_remedies(file: str, tmp_path: Path) -> None:
    step = write_zero(tmp_path, 2, 2)
    shutil.copy(step / MODEL, step / file)
    with pytest.raises(UnsupportedLeafError, match=r"ds_to_universal\.py"):
        ckptcore.load(step)
    # The other remedy that the error names.
    assert ckptcore.load(step / OPTIM)["optimizer_state_dict"]["clip_grad"] == 1.0


def test_weights_of_the_trainer_are_preferred_to_its_step(tmp_path: Path) -> None:
    write_zero(tmp_path, 2, 2)
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    assert list(ckptcore.load(tmp_path)) == ["w"]
    assert same_bits(ckptcore.load(tmp_path / "global_step1")["module"]["b"], array("b", (3,)))


def test_a_changed_byte_of_a_partition_is_found(tmp_path: Path) -> None:
    step = write_zero(tmp_path, 2, 2)
    elements = array("long", (7, 11))[6].tobytes()
    path = next(path for path in step.iterdir() if elements in path.read_bytes())
    data = path.read_bytes()
    path.write_bytes(data.replace(elements, elements[:-1] + b"\x01"))
    checkpoint = ConsistentRead(tmp_path, ckptcore.Context(), open_either).open()
    assert isinstance(checkpoint, Checkpoint)
    index: Any = checkpoint.index
    number = checkpoint.tree.paths.index(("module", "w"))
    assert index.unverified(number, checkpoint.store) == set()
    with pytest.raises(ChecksumError, match=f"{path.name}.* is damaged in bytes .* CRC-32"):
        index.unverified(checkpoint.tree.paths.index(("module", "long")), checkpoint.store)


@pytest.mark.parametrize(
    "change",
    [
        {"places": None}, {"places": {}}, {"storages": 3}, {"storages": [[1, 2, 3, 4]] * 9}, {"storage": [99]},
        {"storages": [["f", 5, 1, 0]] * 9}, {"storages": [["f", 0]]}, {"storage": "x"}, {"leaf": [-1]}, {"files": [3]},
    ],
)  # fmt: skip
def test_a_hostile_root_that_names_the_layout_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    write_zero(tmp_path, 2, 2)
    checkpoint = ConsistentRead(tmp_path, ckptcore.Context(), open_either).open()
    assert isinstance(checkpoint, Checkpoint)
    state: Any = checkpoint.stored.state
    for hostile in ({**state, **change}, {key: value for key, value in state.items() if key not in change}):
        with pytest.raises(CorruptCheckpointError):
            DeepSpeedLayout().index(checkpoint.tree, hostile)


def test_saving_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeafError, match="only reads"):
        ckptcore.save(tmp_path / "c", {"w": np.ones(2)}, layout="deepspeed")


def test_a_part_of_a_tensor_parallel_model_is_an_error(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "deepspeed" / "universal_zero1", tmp_path / "c")
    step = tmp_path / "c" / "global_step2_universal"
    shutil.copy(step / MODEL, step / "mp_rank_01_model_states.pt")
    assert ckptcore.load(step)["module"]["out.weight"].shape == (6, 5)
    shutil.rmtree(step / "zero" / "frozen.weight")  # DeepSpeed before 0.19 does not write this directory
    with pytest.raises(UnsupportedLeafError, match="2 tensor parallel ranks"):
        ckptcore.load(step)
    assert ckptcore.load(step, select=ckptcore.select.names("module/out.weight"))


def test_a_save_does_not_delete_other_files_next_to_it(tmp_path: Path) -> None:
    write_zero(tmp_path, 2, 2)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        ckptcore.save(tmp_path, {"w": np.ones(2)}, overwrite=True)
    assert (tmp_path / "latest").exists()


@pytest.mark.parametrize("edge", [lambda step: None, lambda step: (step / "zero_to_fp32.py").write_text("raise")])
def test_a_conversion_contains_the_weights(edge: Callable[[Path], object], tmp_path: Path) -> None:
    edge(write_zero(tmp_path / "c", 3, 3))
    ckptcore.copy(tmp_path / "c", tmp_path / "hf", layout="safetensors", subtree="module")
    loaded = load_file(tmp_path / "hf" / "model.safetensors")
    assert same_bits(loaded["long"], array("long", (7, 11))) and math.prod(loaded["w"].shape) == 30


@pytest.mark.parametrize(
    "name",
    [
        "mp_rank_00_model_states.pt",
        "layer_00-model_00-model_states.pt",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ],
)
def test_a_file_next_to_weights_does_not_hide_them(name: str, tmp_path: Path) -> None:
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    torch.save({"w": torch.zeros(2)}, tmp_path / name)
    assert ckptcore.load(tmp_path)["w"].tolist() == [1, 1]
