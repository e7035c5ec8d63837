"""Programs without JAX and PyTorch load checkpoints of these frameworks, with the abstract tree of `metadata`."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from ckptcore_testing import SaveLoadMatrixTests, assert_same_tree
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1

import ckptcore
from ckptcore.errors import CompositeCheckpointError

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
LAYOUTS = list(SaveLoadMatrixTests().layouts())

PROGRAM: Final = """
import json, pickle, sys


class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "flax", "orbax", "torch", "safetensors", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}: it is refused here")
        return None


sys.meta_path.insert(0, Refusal())
for name in ("jax", "torch"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit("the refusal refuses nothing")

import ckptcore


def load(location):
    try:
        return ckptcore.load(location, ckptcore.metadata(location).abstract)
    except ckptcore.errors.CompositeCheckpointError:
        told = ckptcore.metadata(location).checkpointables
        return ckptcore.load_checkpointables(location, {name: metadata.abstract for name, metadata in told.items()})


loaded = {name: load(location) for name, location in json.loads(sys.argv[1]).items()}
assert not {"jax", "torch"} & set(sys.modules)
with open(sys.argv[2], "wb") as file:
    pickle.dump(loaded, file)
"""


def loaded_elsewhere(locations: dict[str, Path], directory: Path) -> dict[str, Any]:
    """Return the values that a program without frameworks loads, by name."""
    directory.mkdir(exist_ok=True)
    program, result = directory / "program.py", directory / "loaded.pickle"
    program.write_text(PROGRAM)
    told = json.dumps({name: str(location) for name, location in locations.items()})
    done = subprocess.run(
        [sys.executable, str(program), told, str(result)],
        env={name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    values: dict[str, Any] = pickle.loads(result.read_bytes())
    return values


def rows(count: int) -> NamedSharding:
    """Return a sharding of the first axis over devices."""
    mesh = Mesh(np.array(jax.devices()[:count]), ("x",))
    return NamedSharding(mesh, PartitionSpec("x"))  # type: ignore[no-untyped-call]  # JAX leaves its constructor untyped


def jax_state() -> tuple[Any, Any]:
    """Return a state, and the equivalent values of Python and NumPy."""
    key, keys = jax.random.key(7), jax.random.split(jax.random.key(3, impl="rbg"), 4)
    numbers = np.arange(64, dtype=np.float32).reshape(8, 8)
    state = {
        "bfloat16": jax.device_put(jnp.asarray(numbers, jnp.bfloat16), rows(8)),
        "float8": jnp.asarray(numbers[0], jnp.float8_e4m3fn),
        "int4": jnp.arange(-8, 8, dtype=jnp.int4),
        "weak": jnp.asarray(2.5),
        "key": key,
        "keys": jax.device_put(keys, rows(4)),
        "scalar": np.float16(1.5),
        "text scalar": np.str_("four"),
        "text": "é" * 20_000,
        "bytes": b"\x00\xff",
        "values": [1, 2.5, None, True, "short"],
        "layers": {0: jnp.ones((2, 0)), 1: (jnp.ones(3, jnp.complex64),)},
    }
    expected = {
        **state,
        "bfloat16": numbers.astype(ml_dtypes.bfloat16),
        "float8": numbers[0].astype(ml_dtypes.float8_e4m3fn),
        "int4": np.arange(-8, 8).astype(ml_dtypes.int4),
        "weak": np.array(2.5, np.float32),
        "key": np.asarray(jax.random.key_data(key)),
        "keys": np.asarray(jax.random.key_data(keys)),
        "layers": {0: np.ones((2, 0), np.float32), 1: (np.ones(3, np.complex64),)},
    }
    return state, expected


def torch_state() -> tuple[Any, Any]:
    """Return a state, and the equivalent values of Python and NumPy."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    numbers = torch.arange(12.0).reshape(3, 4)
    state = {
        "bfloat16": numbers.bfloat16().t(),
        "float8": numbers.to(torch.float8_e5m2),
        "raw bytes": torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "model": model,
        "optimizer": optimizer,
        "generator": torch.Generator().manual_seed(3),
        "size": torch.Size((2, 3)),
        "step": 3,
    }
    expected = {
        **state,
        "bfloat16": numbers.numpy().T.astype(ml_dtypes.bfloat16),
        "float8": numbers.numpy().astype(ml_dtypes.float8_e5m2),
        "raw bytes": np.arange(4, dtype=np.uint8),
        "parameter": np.ones(2, np.float32),
        "model": in_numpy(model.state_dict()),
        "optimizer": in_numpy(optimizer.state_dict()),
        "generator": {"state": torch.Generator().manual_seed(3).get_state().numpy()},
        "size": (2, 3),
    }
    return state, expected


def in_numpy(state: Any) -> Any:
    """Convert the tensors of a state dict to NumPy arrays."""
    if isinstance(state, torch.Tensor):
        return state.detach().numpy()
    if isinstance(state, dict):
        return type(state)({key: in_numpy(child) for key, child in state.items()})
    return type(state)([in_numpy(child) for child in state]) if isinstance(state, list | tuple) else state


def test_framework_checkpoints_load_without_the_framework(tmp_path: Path) -> None:
    """One new process loads the checkpoints of all layouts."""
    states = {"jax": jax_state(), "torch": torch_state()}
    locations = {f"{name} {layout}": tmp_path / name / layout for name in states for layout in LAYOUTS}
    for layout in LAYOUTS:
        for name, (state, _) in states.items():
            ckptcore.save(tmp_path / name / layout, state, layout=layout)
    values = loaded_elsewhere(locations, tmp_path / "elsewhere")
    for layout in LAYOUTS:
        for name, (_, expected) in states.items():
            assert_same_tree(values[f"{name} {layout}"], expected, f"{name} as {layout}")


def saved_by_others(directory: Path) -> dict[str, tuple[Path, Any]]:
    """Save checkpoints with other libraries. Return their locations and contents by name."""
    numbers = np.arange(32, dtype=np.float32).reshape(8, 4)
    arrays = {"w": numbers.astype(ml_dtypes.bfloat16), "b": np.arange(3, dtype=np.int32)}
    state = {
        "params": {"w": jax.device_put(jnp.asarray(arrays["w"]), rows(8)), "b": jnp.asarray(arrays["b"])},
        "step": 7,
    }
    checkpoints: dict[str, tuple[Path, Any]] = {}
    expected = {"params": arrays, "step": 7}
    v1.save(directory / "orbax v1", state)
    checkpoints["orbax v1"] = directory / "orbax v1", expected
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "orbax v0", state)
    checkpoints["orbax v0"] = directory / "orbax v0", expected
    tensors = {"w": torch.from_numpy(numbers.copy()).bfloat16(), "b": torch.arange(3, dtype=torch.int32)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that there is no process group
        dcp.state_dict_saver.save({"model": tensors, "step": 7}, checkpoint_id=str(directory / "dcp"))
    checkpoints["dcp"] = directory / "dcp", {"model": arrays, "step": 7}
    torch.save({"model": OrderedDict(tensors), "step": 7, "name": "run"}, directory / "torch.pt")
    checkpoints["torch"] = directory / "torch.pt", {"model": OrderedDict(arrays), "step": 7, "name": "run"}
    (directory / "hf").mkdir()
    for number, (name, tensor) in enumerate(tensors.items(), 1):
        safetensors.torch.save_file(
            {name: tensor}, directory / "hf" / f"model-{number:05}-of-00002.safetensors", {"format": "pt"}
        )
    index = {
        "metadata": {},
        "weight_map": {name: f"model-{number:05}-of-00002.safetensors" for number, name in enumerate(tensors, 1)},
    }
    (directory / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoints["hugging face"] = directory / "hf", arrays
    return checkpoints


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax leaves event loops open
def test_foreign_checkpoints_load_without_frameworks(tmp_path: Path) -> None:
    saved = saved_by_others(tmp_path)
    values = loaded_elsewhere({name: location for name, (location, _) in saved.items()}, tmp_path / "elsewhere")
    for name, (_, expected) in saved.items():
        assert_same_tree(sorted_keys(values[name]), sorted_keys(expected), name)


def goldens() -> dict[str, Path]:
    """Return the golden checkpoints of Orbax, AXLearn, Flax, PyTorch, Hugging Face and ckptcore, by name."""
    directories = {}
    for plugin in ("layout_orbax", "layout_dcp"):
        for told in sorted((ROOT / "plugins" / plugin / "tests" / "golden").glob("*.json")):
            described = json.loads(told.read_text())
            directories[f"{plugin} {told.stem}"] = told.with_suffix("") / described.get(
                "directory", described.get("file", "")
            )
    files = directories.pop("layout_dcp torch_files")
    return {**directories, **{path.name: path for path in sorted(files.iterdir())}}


def test_golden_checkpoints_load_without_frameworks(tmp_path: Path) -> None:
    locations = goldens()
    assert len(locations) > 25
    values = loaded_elsewhere(locations, tmp_path / "elsewhere")
    for name, location in locations.items():
        try:
            expected = ckptcore.load(location)
        except CompositeCheckpointError:
            expected = ckptcore.load_checkpointables(location)
        assert_same_tree(values[name], expected, name)


def sorted_keys(tree: Any) -> Any:
    """Sort the keys of all dicts, because several formats store them in another order."""
    if isinstance(tree, dict):
        return type(tree)({key: sorted_keys(tree[key]) for key in sorted(tree)})
    return tree
