"""Programs without torch save and load checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from plugins.layout_dcp.tests.state_dicts import assert_same, loaded, saved

pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning"),
]

GOLDEN = Path(__file__).parent / "golden"

_REFUSE: Final = """
import json, sys


class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchgen", "functorch"):
            raise ModuleNotFoundError(f"No module named {name!r}: it is refused here")
        return None


sys.meta_path.insert(0, Refusal())
try:
    import torch
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("the refusal refuses nothing")

import numpy as np
import ckptcore


def end():
    assert not {"torch", "torch.distributed"} & set(sys.modules)
"""

_SAVE_NUMPY: Final = """
state = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "b": {"names": ["x", 1], "step": 3}}
state["text"] = np.array(["a", "bc"])
ckptcore.save(sys.argv[1], state, layout="dcp")
assert ckptcore.load(sys.argv[1])["text"].tolist() == ["a", "bc"]
assert ckptcore.verify(sys.argv[1]).ok
end()
"""

_SAVE_JAX: Final = """
import jax, jax.numpy as jnp
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))
array = jnp.arange(64, dtype=jnp.bfloat16).reshape(8, 8)
ckptcore.save(sys.argv[1], {"w": jax.device_put(array, sharding), "step": 3}, layout="dcp")
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("y"))
abstract = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16, sharding=sharding)
loaded = ckptcore.load(sys.argv[1], {"w": abstract, "step": 0})
assert loaded["w"].sharding == abstract.sharding and (loaded["w"] == array).all()
end()
"""

_LOAD: Final = """
def listed(value):
    if isinstance(value, dict):
        return {key: listed(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [listed(inner) for inner in value]
    return value.astype(np.float64).tolist() if isinstance(value, np.ndarray) else value


print(json.dumps(listed(ckptcore.load(sys.argv[1]))))
report = ckptcore.verify(sys.argv[1])
assert report.ok, report
ckptcore.copy(sys.argv[1], sys.argv[2], layout="safetensors")
ckptcore.copy(sys.argv[2], sys.argv[3], layout="dcp")
end()
"""

_LOAD_JAX: Final = """
import jax
jax.config.update("jax_enable_x64", True)
mesh = jax.sharding.Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("x", "y"))


def wanted(leaf):
    if not isinstance(leaf, np.ndarray):
        return leaf
    sized = zip(leaf.shape, (("x", 2), ("y", 3)))
    axes = [name if extent % size == 0 and extent else None for extent, (name, size) in sized]
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


whole = ckptcore.load(sys.argv[1])
abstract = jax.tree.map(wanted, whole)
loaded = ckptcore.load(sys.argv[1], abstract)
leaves = zip(jax.tree.leaves(loaded), jax.tree.leaves(abstract), jax.tree.leaves(whole), strict=True)
split = 0
for leaf, asked, expected in leaves:
    if isinstance(leaf, jax.Array):
        assert leaf.sharding == asked.sharding and np.asarray(leaf).tobytes() == expected.tobytes()
        split += not leaf.is_fully_replicated
print(json.dumps(split))
end()
"""

_TORCH_FILE: Final = """
print(json.dumps({name: array.astype(np.float64).tolist() for name, array in ckptcore.load(sys.argv[1]).items()}))
end()
"""

_DAMAGED: Final = """
try:
    ckptcore.load(sys.argv[1])
except ckptcore.CheckpointError as error:
    print(json.dumps(type(error).__name__))
end()
"""

_HOOKS: Final = """
from ckptcore.plugins import installed_plugins
for name in ("dcp", "torch"):
    installed_plugins().layout(name)
end()
"""


def run(program: str, *arguments: Path) -> Any:
    """Return the output of a program without torch, parsed as JSON; None if it is empty."""
    done = subprocess.run(
        [sys.executable, "-c", _REFUSE + program, *map(str, arguments)],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout) if done.stdout.strip() else None


def test_torch_loads_a_state_of_numpy(tmp_path: Path) -> None:
    run(_SAVE_NUMPY, tmp_path / "c")
    restored = loaded(tmp_path / "c", {"w": torch.zeros(3, 4), "b": {"names": None, "step": None}})
    assert_same(restored, {"w": torch.arange(12.0).reshape(3, 4), "b": {"names": ["x", 1], "step": 3}})


def test_torch_loads_a_state_of_jax(tmp_path: Path) -> None:
    run(_SAVE_JAX, tmp_path / "c")
    restored = loaded(tmp_path / "c", {"w": torch.zeros(8, 8, dtype=torch.bfloat16), "step": None})
    assert_same(restored, {"w": torch.arange(64).reshape(8, 8).bfloat16(), "step": 3})


@pytest.mark.parametrize("writer", [{}, {"thread_count": 2, "single_file_per_rank": False}])
def test_a_checkpoint_of_torch_loads(tmp_path: Path, writer: dict[str, Any]) -> None:
    state: dict[str, Any] = {
        "model": {"w": torch.arange(6.0).reshape(2, 3).t(), "b": torch.ones(2, dtype=torch.bfloat16)},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}],
        "step": 7,
    }
    saved(dict(state), tmp_path / "c", **writer)
    answer = run(_LOAD, tmp_path / "c", tmp_path / "s", tmp_path / "back")
    assert answer == {
        "model": {"w": [[0, 3], [1, 4], [2, 5]], "b": [1, 1]},
        "param_groups": [{"lr": 0.1, "betas": [0.9, 0.99], "params": [0, 1]}],
        "step": 7,
    }
    again = loaded(tmp_path / "back", {"model": {name: torch.zeros_like(t) for name, t in state["model"].items()}})
    assert_same(again["model"], state["model"])


@pytest.mark.parametrize("name", ["two_processes", "plain", "hugging_face_shards"])
def test_sharded_tensors_of_torch_load_as_sharded_jax_arrays(name: str) -> None:
    """Some goldens contain DTensors that two processes saved."""
    assert run(_LOAD_JAX, GOLDEN / name) > 0


def test_a_file_of_torch_save_loads(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(6.0).reshape(2, 3).t(), "b": torch.ones(2)}, tmp_path / "w.pt")
    assert run(_TORCH_FILE, tmp_path / "w.pt") == {"w": [[0, 3], [1, 4], [2, 5]], "b": [1, 1]}


def test_errors_need_no_torch(tmp_path: Path) -> None:
    saved({"w": torch.ones(3)}, tmp_path / "c")
    data = (tmp_path / "c" / ".metadata").read_bytes()
    (tmp_path / "c" / ".metadata").write_bytes(data[: len(data) // 2])
    assert run(_DAMAGED, tmp_path / "c") == "CorruptCheckpointError"


def test_the_layouts_are_created_without_torch() -> None:
    run(_HOOKS)
