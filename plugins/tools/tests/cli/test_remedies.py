"""Remedies in the errors of commands. Each test follows the text of an error, and the command must then succeed."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptcore
from plugins.tools.tests.cli.conftest import Run

STATE = {"w": np.arange(6.0).reshape(2, 3), "b": np.ones(3)}


def message(run: Run, *arguments: object) -> str:
    """Return the error message of a command."""
    result = run(*arguments)
    assert result.exit_code not in (0, 70)
    return " ".join(result.stderr.split())


def commands(text: str) -> list[list[str]]:
    """Return the arguments of the commands that an error names."""
    return [shlex.split(command) for command in re.findall(r"`ckptcore ([^`]+)`", text)]


def test_a_directory_of_steps_is_not_a_checkpoint(tmp_path: Path, run: Run) -> None:
    for step in (3, 4):
        ckptcore.save(tmp_path / "run" / str(step), STATE)
    text = message(run, "inspect", tmp_path / "run")
    assert f"such as {tmp_path}/run/4, or list them with `ckptcore steps {tmp_path}/run`" in text
    (listing,) = commands(text)
    assert [step["step"] for step in json.loads(run(*listing, "--json").stdout)["steps"]] == [3, 4]
    assert run("inspect", f"{tmp_path}/run/4").exit_code == 0


def test_a_checkpoint_is_not_a_directory_of_steps(tmp_path: Path, run: Run) -> None:
    ckptcore.save(tmp_path / "run" / "3", STATE)
    text = message(run, "steps", tmp_path / "run" / "3")
    assert "Give its parent directory, or use `ckptcore inspect " in text
    (inspection,) = commands(text)
    assert run(*inspection).exit_code == 0
    assert "3" in run("steps", tmp_path / "run").stdout


def test_a_directory_that_does_not_exist(tmp_path: Path, run: Run) -> None:
    ckptcore.save(tmp_path / "run" / "3", STATE)
    assert f"{tmp_path}/rnu: no such directory; check the path" in message(run, "steps", tmp_path / "rnu")
    assert run("steps", tmp_path / "run").exit_code == 0


def test_deletions_without_a_terminal(tmp_path: Path, run: Run) -> None:
    for step in (3, 4):
        ckptcore.save(tmp_path / "run" / str(step), STATE)
    command = ("gc", tmp_path / "run", "--policy", "latest_n=1")
    assert "Pass --yes to delete, or --dry-run to see what would be deleted" in message(run, *command)
    assert run(*command, "--dry-run").exit_code == 0
    assert ckptcore.CheckpointReader(tmp_path / "run").steps == (3, 4)
    assert run(*command, "--yes").exit_code == 0
    assert ckptcore.CheckpointReader(tmp_path / "run").steps == (4,)


def test_a_missing_file(tmp_path: Path, run: Run) -> None:
    ckptcore.save(tmp_path / "a", STATE)
    (tmp_path / "a" / "model.safetensors").unlink()
    (verification,) = commands(" ".join(run("inspect", tmp_path / "a").stdout.split()))
    assert verification[0] == "verify"
    result = run(*verification)
    assert result.exit_code == 1
    assert "model.safetensors" in result.stdout


def test_options_of_storages(tmp_path: Path, run: Run) -> None:
    ckptcore.save(tmp_path / "a", STATE)
    text = message(run, "ls", "--option", "endpoint=x", tmp_path / "a")
    assert "expected SCHEME.NAME=VALUE, such as s3.endpoint=http://127.0.0.1:9000" in text
    example = text.rpartition("such as ")[2].split()[0]
    assert run("ls", "--option", example, tmp_path / "a").exit_code == 0


def test_maps_and_their_options(tmp_path: Path, run: Run) -> None:
    """The error uses the names of the command's options."""
    pytest.importorskip("ckptcore_transforms")
    ckptcore.save(tmp_path / "a", {"x": np.ones(2)})
    text = message(run, "convert", "--map", "lama-to-scanned", tmp_path / "a", tmp_path / "b")
    assert "did you mean 'llama-to-scanned'? Maps: bert-to-scanned, " in text
    text = message(run, "convert", "--map", "qwen-to-maxtext", tmp_path / "a", tmp_path / "b")
    assert "requires --head-dim: set the number of elements of a head" in text
    text = message(run, "convert", "--map", "qwen-to-maxtext", "--head-dim", "4", tmp_path / "a", tmp_path / "b")
    assert "--head-dim" not in text
    assert "model.embed_tokens.weight" in text
    text = message(run, "convert", "--map", "bert-to-scanned", "--head-dim", "4", tmp_path / "a", tmp_path / "b")
    assert "does not use --head-dim=4: remove it" in text


def test_leaves_that_are_unknown_to_a_map(tmp_path: Path, run: Run) -> None:
    """The command cannot drop leaves, so the error names functions that can."""
    pytest.importorskip("ckptcore_transforms")
    ckptcore.save(tmp_path / "a", _bert() | {"encoder.layer.0.odd": np.ones(2)})
    text = message(run, "convert", "--map", "bert-to-scanned", tmp_path / "a", tmp_path / "b")
    assert "put Rename, or Drop if it is not needed, first in the transforms of ckptcore.load or ckptcore.copy" in text
    transforms = [ckptcore.transforms.Drop("encoder.layer.0.odd"), *ckptcore.transforms.maps.bert_to_scanned()]
    ckptcore.copy(tmp_path / "a", tmp_path / "b", layout="safetensors", transforms=transforms)
    assert ckptcore.load(tmp_path / "b")["encoder"]["layers"]["norm"]["scale"].tolist() == [[1, 2]]


def _bert() -> dict[str, Any]:
    """Return the weights of the smallest BERT encoder."""
    layer, two = "encoder.layer.0", np.array([1.0, 2.0])
    state = {f"embeddings.{name}_embeddings.weight": np.ones((2, 2)) for name in ("word", "position", "token_type")}
    norms = ("embeddings.LayerNorm", f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm")
    parts = [f"{layer}.attention.self.{part}" for part in ("query", "key", "value")]
    dense = [*parts, *(f"{layer}.{name}.dense" for name in ("attention.output", "intermediate", "output"))]
    state |= {f"{name}.{kind}": two for name in norms for kind in ("weight", "bias")}
    return state | {f"{name}.weight": np.ones((2, 2)) for name in dense} | {f"{name}.bias": two for name in dense}


def test_several_checkpointables_and_a_map(tmp_path: Path, run: Run) -> None:
    pytest.importorskip("ckptcore_transforms")
    ckptcore.save_checkpointables(tmp_path / "a", {"model": _bert(), "other": {"n": 1}})
    text = message(run, "convert", "--map", "bert-to-scanned", tmp_path / "a", tmp_path / "b")
    assert f"Convert each by its own location, such as {tmp_path}/a/model. Nothing was converted" in text
    assert not (tmp_path / "b").exists()
    named = text.partition("such as ")[2].partition(". Nothing")[0]
    assert run("convert", "--map", "bert-to-scanned", named, tmp_path / "b").exit_code == 0
    assert ckptcore.load(tmp_path / "b")["encoder"]["layers"]["norm"]["scale"].tolist() == [[1, 2]]


def test_a_subtree_that_does_not_exist(tmp_path: Path, run: Run) -> None:
    ckptcore.save(tmp_path / "a", {"model": STATE})
    text = message(run, "consolidate", "--subtree", "modl", tmp_path / "a", tmp_path / "b")
    assert "Give an existing subtree, or leave out --subtree for the whole tree" in text
    assert run("consolidate", tmp_path / "a", tmp_path / "b").exit_code == 0
    assert np.array_equal(ckptcore.load(tmp_path / "b")["model"]["w"], STATE["w"])


@pytest.mark.parametrize("name", ["broken", "wrong"])
def test_a_broken_command(name: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error suggests an update or an uninstall. Either is enough."""
    information = tmp_path / "guest-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: guest\nVersion: 1.0\n", encoding="utf-8")
    (information / "entry_points.txt").write_text(f"[ckptcore.commands]\n{name} = guest_{name}:size\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"guest_{name}.py").write_text("size = 3\n" if name == "wrong" else "import missing_module\n", "utf-8")
    assert "of guest cannot be loaded" in message(run, name)
    assert "Update or uninstall that distribution" in message(run, name)
    if name == "wrong":
        (information / "entry_points.txt").unlink()
        assert f"No such command '{name}'" in message(run, name)
    else:
        (tmp_path / "guest_broken.py").write_text("import click\nsize = click.Command('size')\n", encoding="utf-8")
        assert run(name).exit_code == 0
    assert run("--help").exit_code == 0
