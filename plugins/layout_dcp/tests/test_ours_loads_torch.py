"""ckptcore loads everything that torch.distributed.checkpoint writes, bit for bit."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from ckptcore_testing import SHAPES, FaultPlan
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict

import ckptcore
from ckptcore.errors import ChecksumError, TreeMismatchError, UnsupportedLeafError
from ckptcore.model import ArraySpec, Box
from plugins.layout_dcp.tests.counted_places import Part, counted, place
from plugins.layout_dcp.tests.state_dicts import (
    DTYPES,
    NESTED,
    assert_same,
    blank,
    bytes_of,
    loaded,
    network,
    saved,
    tensor_of,
    trained,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
]

WRITERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "file for each tensor": {"single_file_per_rank": False},
    "threads": {"thread_count": 3},
    "threads, file for each tensor": {"thread_count": 3, "single_file_per_rank": False},
    "no sync": {"sync_files": False},
    "zstd": {"_extensions": [ZStandard()]},
    "zstd, threads": {"_extensions": [ZStandard()], "thread_count": 2},
    "staged": {"cache_staged_state_dict": True},
}


def awkward() -> dict[str, torch.Tensor]:
    """Return strided tensors, and tensors of every dtype and number of axes."""
    base = torch.randn(4, 3, 6, 5)
    state = {f"{dtype}-{shape}": tensor_of(ArraySpec(shape, dtype)) for dtype in DTYPES for shape in SHAPES}
    return {
        **state,
        "transposed": torch.arange(12).reshape(3, 4).t(),
        "stepped": torch.arange(40.0)[3::4],
        "channels last": base.to(memory_format=torch.channels_last),
        "expanded": torch.arange(3.0).expand(5, 3),
        "of a larger one": base[1:3, :, 2],
        "fp8 transposed": torch.randn(5, 3).to(torch.float8_e4m3fn).t(),
        "uint16 stepped": torch.arange(30, dtype=torch.int32).to(torch.uint16).reshape(5, 6)[:, ::2],
        "needs a gradient": torch.nn.Parameter(torch.ones(2, 2)),
        "buffer": torch.nn.Buffer(torch.ones(2)),
        "a page": torch.randn(1 << 19)[:-3],
        "large transposed": torch.randn(700, 900).t(),
    }


@pytest.mark.parametrize("writer", WRITERS)
def test_every_tensor_loads_with_every_option_of_the_writer(tmp_path: Path, writer: str) -> None:
    state = awkward()
    saved(dict(state), tmp_path / "c", **WRITERS[writer])
    restored = ckptcore.load(tmp_path / "c")
    assert set(restored) == set(state)
    for name, tensor in state.items():
        assert restored[name].shape == tuple(tensor.shape), name
        assert str(restored[name].dtype) == str(tensor.dtype).removeprefix("torch."), name
        assert restored[name].tobytes() == bytes_of(tensor), name
    like = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in state.items()}
    assert_same(ckptcore.load(tmp_path / "c", like), {name: tensor.detach() for name, tensor in state.items()})
    assert ckptcore.verify(tmp_path / "c").ok


@pytest.mark.parametrize("writer", WRITERS)
def test_nested_state_dicts(tmp_path: Path, writer: str) -> None:
    saved(dict(NESTED), tmp_path / "c", **WRITERS[writer])
    assert_same(ckptcore.load(tmp_path / "c", _meta(NESTED)), NESTED)
    assert_same(_as_tensors(ckptcore.load(tmp_path / "c")), NESTED)


def _meta(value: Any) -> Any:
    """Return an abstract tree of a state dict."""
    if isinstance(value, dict):
        return {key: _meta(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_meta(inner) for inner in value)
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _as_tensors(value: Any) -> Any:
    """Convert NumPy arrays to torch tensors."""
    if isinstance(value, dict):
        return {key: _as_tensors(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_as_tensors(inner) for inner in value)
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "RMSprop"])
def test_optimizers_resume_with_equal_losses(tmp_path: Path, kind: str) -> None:
    def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        net = network(seed)
        options = {"momentum": 0.9, "nesterov": True} if kind == "SGD" else {}
        optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.05, **options)
        trained(net, optimizer, seed)
        return net, optimizer

    def state(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer)}

    net, optimizer = made(0)
    saved(state(net, optimizer), tmp_path / "c")
    expected = trained(net, optimizer, 9)
    other, its_optimizer = made(1)
    restored = ckptcore.load(tmp_path / "c", state(other, its_optimizer))
    set_state_dict(other, its_optimizer, model_state_dict=restored["model"], optim_state_dict=restored["optimizer"])
    assert trained(other, its_optimizer, 9) == expected


def test_a_plain_state_dict_of_an_optimizer(tmp_path: Path) -> None:
    """The state dict has numbers as keys, which torch stores as text."""
    net = network(0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, amsgrad=True)
    trained(net, optimizer, 0)
    state = optimizer.state_dict()
    saved(dict(state), tmp_path / "c")
    restored = ckptcore.load(tmp_path / "c", state)
    assert_same(restored, state)


def test_load_into_keeps_the_memory_of_tensors(tmp_path: Path) -> None:
    state = {"net": dict(network(0).state_dict()), "plain": torch.arange(5.0), "step": 4}
    saved(dict(state), tmp_path / "c")
    other = {"net": dict(network(1).state_dict()), "plain": torch.zeros(5), "step": 0}
    places = {name: tensor.data_ptr() for name, tensor in other["net"].items()}  # type: ignore[attr-defined]
    ckptcore.load_into(tmp_path / "c", other)
    assert_same(other, state)
    assert {name: tensor.data_ptr() for name, tensor in other["net"].items()} == places  # type: ignore[attr-defined]
    module = network(2)
    ckptcore.load_into(tmp_path / "c", {"net": module.state_dict(), "plain": np.zeros(5, "f4"), "step": 0})
    assert_same(dict(module.state_dict()), state["net"])


def test_tensors_load_onto_a_mesh_of_jax(tmp_path: Path) -> None:
    state = {
        "w": torch.randn(64, 24),
        "bf16": torch.randn(16, 8).bfloat16(),
        "uneven order": torch.randn(24, 64).t(),
        "large": torch.randn(1024, 600),
        "step": 3,
    }
    saved(dict(state), tmp_path / "c")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))
    parts = jax.sharding.PartitionSpec
    like = {
        "w": jax.ShapeDtypeStruct((64, 24), "float32", sharding=jax.sharding.NamedSharding(mesh, parts("x", "y"))),  # type: ignore[no-untyped-call]
        "bf16": jax.ShapeDtypeStruct((16, 8), jnp.bfloat16, sharding=jax.sharding.NamedSharding(mesh, parts("y"))),  # type: ignore[no-untyped-call]
        "uneven order": jax.ShapeDtypeStruct(
            (64, 24),
            "float32",
            sharding=jax.sharding.NamedSharding(mesh, parts(("x", "y"))),  # type: ignore[no-untyped-call]
        ),
        "large": jax.ShapeDtypeStruct(
            (1024, 600),
            "float32",
            sharding=jax.sharding.NamedSharding(mesh, parts("y", "x")),  # type: ignore[no-untyped-call]
        ),
        "step": 0,
    }
    restored = ckptcore.load(tmp_path / "c", like)
    for name in ("w", "bf16", "uneven order", "large"):
        assert restored[name].sharding == like[name].sharding  # type: ignore[attr-defined]
        assert np.asarray(restored[name]).tobytes() == bytes_of(state[name]), name  # type: ignore[arg-type]
    assert restored["step"] == 3


@pytest.mark.parametrize("writer", ["plain", "file for each tensor", "ours"])
@pytest.mark.parametrize(("shape", "axis"), [((4096, 2048), 0), ((8, 1 << 20), 1)])
def test_a_quarter_of_a_tensor_reads_a_quarter(tmp_path: Path, writer: str, shape: tuple[int, int], axis: int) -> None:
    """The requested elements are contiguous on axis 0, and in runs of 1 MiB on axis 1."""
    tensor = torch.randn(shape)
    state = {"w": tensor, "other": torch.randn(1 << 20)}
    if writer == "ours":
        ckptcore.save(tmp_path / "c", state, layout="dcp")
    else:
        saved(dict(state), tmp_path / "c", **WRITERS[writer])
    start, stop = [0, 0], list(shape)
    start[axis], stop[axis] = shape[axis] // 4, shape[axis] // 2
    box = Box(tuple(start), tuple(stop))
    plan = FaultPlan()
    like = {"w": Part(ArraySpec(shape, "float32"), box), "other": ckptcore.PLACEHOLDER}
    restored = ckptcore.load(place(tmp_path / "c"), like, context=counted(plan))
    assert np.array_equal(restored["w"], tensor.numpy()[box.slices])
    wanted = box.size * 4
    # A checksum of ckptcore covers a block of 1 MiB, which is read completely. Each run of elements can need one block
    # more.
    runs = shape[0] if axis else 1
    room = runs << 20 if writer == "ours" else 0
    assert wanted <= plan.bytes_read <= wanted + room + (1 << 16)


def test_unrequested_tensors_are_not_read(tmp_path: Path) -> None:
    saved({"large": torch.randn(1 << 22), "small": torch.ones(3), "step": 1}, tmp_path / "c")
    plan = FaultPlan()
    like = {"large": ckptcore.PLACEHOLDER, "small": torch.empty(3, device="meta"), "step": 0}
    restored = ckptcore.load(place(tmp_path / "c"), like, context=counted(plan))
    assert_same(restored["small"], torch.ones(3))
    assert plan.bytes_read < 1 << 16
    plan = FaultPlan()
    abstract = ckptcore.metadata(place(tmp_path / "c"), context=counted(plan)).abstract
    assert abstract["large"].shape == (1 << 22,)
    assert plan.bytes_read < 1 << 16


@pytest.mark.parametrize("layout", ["safetensors", "ocdbt"])
def test_conversions_in_both_directions_lose_nothing(tmp_path: Path, layout: str) -> None:
    saved(dict(NESTED), tmp_path / "c")
    ckptcore.copy(tmp_path / "c", tmp_path / "there", layout=layout)
    assert ckptcore.metadata(tmp_path / "there").layout == layout
    assert_same(_as_tensors(ckptcore.load(tmp_path / "there")), NESTED)
    ckptcore.copy(tmp_path / "there", tmp_path / "back", layout="dcp")
    assert_same(loaded(tmp_path / "back", blank(NESTED)), NESTED)
    assert ckptcore.verify(tmp_path / "back").ok
    ckptcore.copy(tmp_path / "c", tmp_path / "direct", layout="dcp")
    assert_same(loaded(tmp_path / "direct", blank(NESTED)), NESTED)


def test_nothing_is_lost_if_both_libraries_save_in_turn(tmp_path: Path) -> None:
    """Each library saves what it loaded from the other."""
    state: dict[str, Any] = {**awkward(), **NESTED}
    state = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
    saved(dict(state), tmp_path / "0")
    for number in range(2):
        state_here = ckptcore.load(tmp_path / str(2 * number), _meta(state))
        ckptcore.save(tmp_path / str(2 * number + 1), state_here, layout="dcp")
        restored = loaded(tmp_path / str(2 * number + 1), blank(state))
        saved(restored, tmp_path / str(2 * number + 2))
    assert_same(ckptcore.load(tmp_path / "4", _meta(state)), state)


@pytest.mark.parametrize(
    ("shape", "dtype"), list(itertools.product([(2, 3), (3, 2), (6,), (2, 3, 1)], [torch.float32, torch.bfloat16]))[1:]
)
def test_another_shape_or_dtype_is_error_with_path(tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """torch would cast the elements without an error."""
    saved({"model": {"w": torch.randn(2, 3)}}, tmp_path / "c")
    if shape == (2, 3):
        cast = loaded(tmp_path / "c", {"model": {"w": torch.zeros(shape, dtype=dtype)}})
        assert cast["model"]["w"].dtype == dtype
    with pytest.raises(TreeMismatchError, match="model.*w"):
        ckptcore.load(tmp_path / "c", {"model": {"w": torch.zeros(shape, dtype=dtype)}})
    with pytest.raises(TreeMismatchError, match="model.*w"):
        ckptcore.load_into(tmp_path / "c", {"model": {"w": torch.zeros(shape, dtype=dtype)}})


def test_stale_files_of_a_larger_job_are_ignored(tmp_path: Path) -> None:
    """torch overwrites a checkpoint in place, and does not remove the files of a larger job."""
    saved({f"t{number}": torch.randn(10) for number in range(4)}, tmp_path / "c", thread_count=4)
    state = {"t0": torch.ones(10)}
    saved(dict(state), tmp_path / "c")
    assert len(list((tmp_path / "c").glob("*.distcp"))) > 1
    assert_same(ckptcore.load(tmp_path / "c", _meta(state)), state)
    assert ckptcore.verify(tmp_path / "c").ok


def test_an_optimizer_loads_a_state_with_text_keys(tmp_path: Path) -> None:
    """The keys of an optimizer's state are numbers. DCP stores them as text."""

    def stepped(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(steps)
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (steps + 1))
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        return model, optimizer

    _, original = stepped(3)
    saved({"optimizer": original.state_dict()}, tmp_path / "theirs")
    for steps in (0, 2):  # an optimizer without state, and one with state
        _, optimizer = stepped(steps)
        ckptcore.load_into(tmp_path / "theirs", {"optimizer": optimizer})
        actual, expected = optimizer.state_dict(), original.state_dict()
        assert actual["param_groups"] == expected["param_groups"]
        assert list(actual["state"]) == [0, 1]
        for number, slots in expected["state"].items():
            assert all(torch.equal(actual["state"][number][name], held) for name, held in slots.items())


def _in_tuples() -> dict[str, Any]:
    tied = torch.arange(6.0).reshape(2, 3)
    return {
        "pair": (tied, 5, {"deep": [tied.t(), torch.ones(4, dtype=torch.bfloat16)[1:]]}),
        "moments": (torch.zeros(0), tied, torch.tensor(3)),
        "w": torch.ones(3),
    }


@pytest.mark.parametrize("writer", ["plain", "file for each tensor"])
def test_tensors_in_tuples(tmp_path: Path, writer: str) -> None:
    state = _in_tuples()
    saved(state, tmp_path / "theirs", **WRITERS[writer])
    restored = ckptcore.load(tmp_path / "theirs")
    pair, moments = restored["pair"], restored["moments"]
    assert isinstance(pair, tuple) and pair[1] == 5 and np.array_equal(pair[0], state["pair"][0].numpy())
    assert np.array_equal(pair[2]["deep"][0], pair[0].T) and pair[2]["deep"][1].tolist() == [1, 1, 1]
    assert moments[0].shape == (0,) and np.array_equal(moments[1], pair[0]) and moments[2] == 3
    assert ckptcore.verify(tmp_path / "theirs").ok
    into = {"pair": (torch.zeros(2, 3), 0, {"deep": [torch.zeros(3, 2), torch.zeros(3, dtype=torch.bfloat16)]})}
    into |= {"moments": ckptcore.PLACEHOLDER, "w": torch.zeros(3)}
    ckptcore.load_into(tmp_path / "theirs", into)
    assert torch.equal(into["pair"][0], state["pair"][0]) and torch.equal(into["w"], state["w"])
    ckptcore.copy(tmp_path / "theirs", tmp_path / "ours", layout="dcp")
    again = ckptcore.load(tmp_path / "ours")
    assert np.array_equal(again["pair"][0], pair[0]) and np.array_equal(again["moments"][1], pair[0])


def test_damage_of_a_tensor_in_a_tuple_is_found(tmp_path: Path) -> None:
    saved({"pair": (torch.arange(1000.0), 1)}, tmp_path / "theirs")
    (file,) = (tmp_path / "theirs").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.index(torch.arange(1000.0).numpy().tobytes()) + 1000] ^= 1
    file.write_bytes(data)
    with pytest.raises(ChecksumError, match="pair"):
        ckptcore.load(tmp_path / "theirs")


def test_tensors_in_compressed_tuples_are_refused_by_name(tmp_path: Path) -> None:
    saved({"pair": (torch.ones(2), 5), "w": torch.ones(3)}, tmp_path / "theirs", **WRITERS["zstd"])
    with pytest.raises(UnsupportedLeafError, match=r"pair\[0\].*in a tuple.*compressed.*PLACEHOLDER"):
        ckptcore.load(tmp_path / "theirs")
    asked = {"pair": (ckptcore.PLACEHOLDER, 0), "w": torch.zeros(3)}
    assert torch.equal(ckptcore.load(tmp_path / "theirs", asked)["w"], torch.ones(3))


def test_buffers_load_as_bytes_and_into_buffers(tmp_path: Path) -> None:
    """TorchTitan stores part of its state in a BytesIO that contains the output of torch.save."""
    buffer = io.BytesIO()
    torch.save([1, 2.5], buffer)
    saved({"state": {"blob": buffer, "empty": io.BytesIO()}}, tmp_path / "theirs")
    assert ckptcore.load(tmp_path / "theirs")["state"] == {"blob": buffer.getvalue(), "empty": b""}
    restored = ckptcore.load(tmp_path / "theirs", {"state": {"blob": io.BytesIO(), "empty": io.BytesIO()}})
    assert torch.load(restored["state"]["blob"]) == [1, 2.5]
