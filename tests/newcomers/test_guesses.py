"""First calls that newcomers try. The guesses were written after reading only README.md."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import inspect
import os
import shlex
import shutil
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from ckptcore_tools.cli.application import application
from click.testing import CliRunner

import ckptcore


class Guess(NamedTuple):
    """A statement or command, and its expected result or error.

    Attributes:
        source: Python code, or a command line that starts with ``$``.
        result: an expression that is true afterwards. It can use `load`, and `result`, the value of the guess.
        error: the start of the error's type and message, then other parts of the message, separated by ``...``.
    """

    source: str
    result: str = ""
    error: str = ""


SAVING: Final = [
    Guess('ckptcore.save(model, "new")', error="InvalidLocationError...Linear; the location is the first argument"),
    Guess('ckptcore.save("new", model)', "torch.equal(torch.from_numpy(load('new')['weight']), model.weight)"),
    Guess('ckptcore.save("new", model.state_dict())', "[*load('new')] == ['weight', 'bias']"),
    Guess('ckptcore.save(pathlib.Path("a/b/c"), {"w": np.ones(2)})', "load('a/b/c')['w'].sum() == 2"),
    Guess(
        'ckptcore.save("new", {"epoch": 3, "loss": 0.25, "name": "run 1", "done": False, "best": None})',
        "load('new') == {'epoch': 3, 'loss': 0.25, 'name': 'run 1', 'done': False, 'best': None}",
    ),
    Guess(
        'ckptcore.save("new", {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10)})',
        "load('new')['scheduler']['step_size'] == 10",
    ),
    Guess('ckptcore.save("new", {"rng": torch.get_rng_state()})', "load('new')['rng'].dtype == np.uint8"),
    Guess('ckptcore.save("new", torch.ones(3))', "load('new').tolist() == [1, 1, 1]"),
    Guess(
        'ckptcore.save("new", {"w": torch.ones(3, dtype=torch.bfloat16)})',
        "load('new')['w'].dtype == 'bfloat16' and load('new', framework='torch')['w'].dtype == torch.bfloat16",
    ),
    Guess(
        'ckptcore.save("new", {"args": argparse.Namespace(lr=0.1)})', error="UnsupportedLeafError...save vars(value)"
    ),
    Guess('ckptcore.save("new", {"config": Config(lr=0.1)})', "load('new') == {'config': {'lr': 0.1}}"),
    Guess(
        'ckptcore.save("new", {"metrics": pandas.DataFrame({"loss": [1.0]})})',
        error="UnsupportedLeafError: metrics is a pandas.DataFrame...save {name: column.to_numpy()",
    ),
    Guess(
        'ckptcore.save("new", {"layers": [np.ones(2), np.ones(3)], "sizes": (2, 3)})',
        "load('new')['sizes'] == (2, 3) and [x.size for x in load('new')['layers']] == [2, 3]",
    ),
    Guess('ckptcore.save("new", {("layer", 0): np.ones(2)})', "load('new')['layer', 0].sum() == 2"),
    Guess('ckptcore.save("new", {0: np.ones(2), 1: np.ones(2)})', "[*load('new')] == [0, 1]"),
    Guess('ckptcore.save("new", {})', "load('new') == {}"),
    Guess('ckptcore.save("new", None)', "load('new') is None"),
    Guess('ckptcore.save("new", {"lr": np.float32(0.5)})', "load('new')['lr'] == np.float32(0.5)"),
    Guess('ckptcore.save("new", model.parameters())', error="UnsupportedLeafError...generator...save what makes it"),
    Guess(
        'ckptcore.save("new", optax.adam(1e-3).init(params))',
        "load('new', optax.adam(1e-3).init(params))[0].mu['w'].shape == (2,)",
    ),
    Guess('ckptcore.save("new", {"a/b": np.ones(2)})', "[*load('new')] == ['a/b']"),
    Guess('ckptcore.save("new", {"loss": lambda x: x})', error="UnsupportedLeafError: loss is...code is not saved"),
    Guess('ckptcore.save("new", {"seen": {1, 2, 3}})', "load('new')['seen'] == [1, 2, 3]"),
    Guess(
        'ckptcore.save("new", {"names": np.array(["a", None], dtype=object)})',
        error="UnsupportedLeafError: names: dtype object...save value.tolist()...Nothing was written",
    ),
    Guess('ckptcore.save("new", w=np.ones(2))', error="TypeError...'w'; use the second argument: one tree"),
    Guess('ckptcore.save("", {"w": np.ones(2)})', error="InvalidLocationError: '' is not a location; give a path"),
    Guess('ckptcore.save("~/new", {"w": np.ones(2)})', "pathlib.Path.home().joinpath('new/checkpoint.json').is_file()"),
    Guess('ckptcore.save("notes.txt", {"w": np.ones(2)})', error="CheckpointExistsError: notes.txt is a file...remove"),
    Guess('ckptcore.save("new", {"w": loss})', "load('new')['w'] == loss.detach().numpy()"),
]

BACKGROUND: Final = [
    Guess('ckptcore.save_async("new", {"w": np.ones(2)}).result()', "load('new')['w'].sum() == 2"),
    Guess('await ckptcore.save_async("new", {"w": np.ones(2)})', "load('new')['w'].sum() == 2"),
    Guess(
        'ckptcore.async_save({"w": np.ones(2)}, checkpoint_id="new")',
        error="AttributeError...use ckptcore.save_async(path, state)",
    ),
]

LOADING: Final = [
    Guess('ckptcore.load("chekpoint")', error="CheckpointNotFoundError: chekpoint does not exist...check the path"),
    Guess('ckptcore.load("notes.txt")', error="CheckpointNotFoundError: notes.txt is not a checkpoint...it is a text"),
    Guess('ckptcore.load("empty")', error="CheckpointNotFoundError: empty does not exist or is empty...check the path"),
    Guess(
        'ckptcore.load("runs/torch")',
        error="CheckpointNotFoundError...steps (50, 100)...runs/torch/100...CheckpointReader('runs/torch').load()",
    ),
    Guess('ckptcore.load("runs/torch/75")', error="CheckpointNotFoundError...check the path...its steps are 50, 100"),
    Guess('ckptcore.load("ckpt", "torch")', error="TreeMismatchError...A framework is named by framework='torch'"),
    Guess('ckptcore.load("ckpt", framework="pytorch")', error="UnknownPluginError...Installed: jax, numpy, torch"),
    Guess('ckptcore.load("ckpt", target={"w": np.ones(2)})', error="TypeError...'target'; use abstract"),
    Guess('ckptcore.load("ckpt", weights_only=True)', error="TypeError...a load never runs code of a checkpoint"),
    Guess(
        'ckptcore.load("ckpt/model")',
        error="CheckpointNotFoundError...ckptcore.load('ckpt', select=ckptcore.select.names('model'))",
    ),
    Guess(
        'ckptcore.load("weights", slices={"w": np.s_[0:2]})',
        error="TypeError...use ckptcore.open(path), then checkpoint['name'][0:8]",
    ),
    Guess('ckptcore.load("s3:/bucket/run")', error="InvalidLocationError...one slash...give 's3://bucket/run'"),
    Guess('ckptcore.load("s3://")', error="InvalidLocationError...without a name after '://'...s3://name/run"),
    Guess('ckptcore.load(open("notes.txt"))', error="InvalidLocationError: expected a path or a URL...TextIOWrapper"),
    Guess(
        'ckptcore.load_into("ckpt/model", torch.nn.Linear(5, 2))',
        error="CheckpointNotFoundError...load_into('ckpt', {'model': target}, select=ckptcore.select.names('model'))",
    ),
    Guess(
        'ckptcore.load_into("ckpt/model", model)',
        error="CheckpointNotFoundError...load_into('ckpt', {'model': target}, select=ckptcore.select.names('model'))",
    ),
    Guess(
        'ckptcore.load_into("weights", {"w": np.zeros((3, 4)), "b": np.zeros(4)})',
        "result['w'].tolist() == load('weights')['w'].tolist()",
    ),
    Guess(
        'ckptcore.load_into("weights", {"w": jnp.zeros((3, 4)), "b": jnp.zeros(4)})',
        error='TreeMismatchError...float32[3, 4] is requested, float64[3, 4] is stored...Matching(cast="narrowing")',
    ),
]

RUNS: Final = [
    Guess(
        'ckptcore.Checkpointer("runs/new", max_to_keep=3)',
        error="TypeError...use preservation_policy=ckptcore.policies.LatestN(n)",
    ),
    Guess('ckptcore.Checkpointer("runs/new", preservation_policy=3)', error="TypeError...such as LatestN(3)"),
    Guess("checkpointer.latest_step()", error="AttributeError...use latest"),
    Guess("checkpointer.load()", error="CheckpointNotFoundError: there is no committed step in runs/empty...save a"),
    Guess(
        'checkpointer.save({"w": np.ones(2)}, step=1)',
        error="TypeError...multiple values for argument 'step'; the arguments are step, state",
    ),
    Guess(
        'checkpointer.save("epoch-1", {"w": np.ones(2)})', error="TypeError: step='epoch-1': expected a whole number"
    ),
    Guess('checkpointer.save(1, {"w": np.ones(2)}, metrics={"loss": 0.5})', "result.result() is None"),
    Guess("checkpointer.wait_until_finished()", error="AttributeError...use wait()"),
]

COMMANDS: Final = [
    Guess("$ ckptcore show runs/torch/100", error="2...No such command 'show'. Did you mean 'inspect'?"),
    Guess("$ ckptcore view runs/torch --out report.pdf", error="2...a report is one HTML file: name it report.html"),
    Guess("$ ckptcore diff runs/torch/50 runs/torch/100", "result.startswith('the same: 16 leaves')"),
]


@dataclass
class Config:
    """A configuration of a run."""

    lr: float


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    model = torch.nn.Linear(4, 2)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


@pytest.fixture(scope="module")
def prepared(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with two checkpoints, a run, a text file and an empty directory."""
    directory = tmp_path_factory.mktemp("newcomer")
    ckptcore.save(directory / "ckpt", {**state, "epoch": 3})
    ckptcore.save(directory / "weights", {"w": np.arange(12.0).reshape(3, 4), "b": np.zeros(4)})
    with ckptcore.Checkpointer(directory / "runs/torch") as checkpointer:
        for step in (50, 100):
            checkpointer.save_checkpointables(step, state)
    (directory / "notes.txt").write_text("hello")
    (directory / "empty").mkdir()
    return directory


@pytest.fixture
def names(
    prepared: Path, state: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """Return the variables of a newcomer's session in a copy of the directory."""
    monkeypatch.chdir(shutil.copytree(prepared, tmp_path / "work"))
    monkeypatch.setenv("HOME", os.fspath(tmp_path))
    with ckptcore.Checkpointer("runs/empty") as checkpointer, contextlib.ExitStack() as files:
        yield {
            **globals(),
            **{name: importlib.import_module(name) for name in ("argparse", "optax", "pandas", "pathlib")},
            **state,
            "checkpointer": checkpointer,
            "load": ckptcore.load,
            "loss": state["model"](torch.ones(4)).sum(),
            "open": lambda name: files.enter_context(open(name)),
            "params": {"w": jnp.ones(2)},
        }


@pytest.mark.parametrize("guess", [*SAVING, *BACKGROUND, *LOADING, *RUNS, *COMMANDS], ids=lambda guess: guess.source)
def test_a_guess_has_the_expected_result_or_error(guess: Guess, names: dict[str, Any]) -> None:
    names["result"], error = _result_and_error(guess.source, names)
    parts = guess.error.split("...")
    assert error.startswith(parts[0]) and bool(error) == bool(guess.error), error or names["result"]
    for part in parts[1:]:
        assert part in error
    assert guess.error or eval(guess.result, names)


def _result_and_error(source: str, names: dict[str, Any]) -> tuple[object, str]:
    """Return the value of an expression or the output of a command, and the error.

    The error of a command is its exit code and stderr.
    """
    if source.startswith("$ ckptcore "):
        done = CliRunner().invoke(application, shlex.split(source)[2:])
        return done.stdout, f"{done.exit_code}: {done.stderr}" if done.exit_code else ""
    try:
        result = eval(compile(source, "guess", "eval", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        return _run(result) if inspect.iscoroutine(result) else result, ""
    except Exception as error:  # noqa: BLE001  # the text is compared
        return None, "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in a new thread, because a browser of other tests may run an event loop in this thread."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, coroutine).result()


def test_the_suggested_load_of_a_part_of_a_tree_works(names: dict[str, Any]) -> None:
    loaded = ckptcore.load("ckpt", select=ckptcore.select.names("model"))
    target = torch.nn.Linear(4, 2)
    ckptcore.load_into("ckpt", {"model": target}, select=ckptcore.select.names("model"))
    assert [*loaded] == ["model"] and np.array_equal(loaded["model"]["weight"], target.weight.detach())


def test_the_error_about_a_missing_checkpointable_names_the_others(names: dict[str, Any]) -> None:
    with pytest.raises(ckptcore.errors.CheckpointNotFoundError, match=r"several checkpointables: model, optimizer$"):
        ckptcore.load("runs/torch/100/weights")


def test_a_load_can_be_awaited(names: dict[str, Any]) -> None:
    async def load() -> Any:
        return await ckptcore.load_async("weights")

    assert _run(load())["w"].shape == (3, 4)
