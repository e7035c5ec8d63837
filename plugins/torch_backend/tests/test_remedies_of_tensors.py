"""Remedies in the errors of all kinds of tensors. Each test follows the remedy, and checks the loaded elements."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ckptcore_testing.trees import same_value
from ckptcore_torch import conversions
from ckptcore_torch.store_coordinator import StoreCoordinator
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import ckptcore
from ckptcore import AbstractArray, Context
from ckptcore.context import JobOptions
from plugins.torch_backend.tests.test_remedies import VALUES, refused
from plugins.torch_backend.tests.test_tensor_parts import bits, scaled

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors"),
]


@pytest.fixture
def mesh(alone: None) -> Any:
    """A mesh of this process alone."""
    return init_device_mesh("cpu", (1,))


def quantized(dtype: torch.dtype = torch.qint8, scale: float = 0.5) -> torch.Tensor:
    return torch.quantize_per_tensor(VALUES, scale, 1, dtype)


# --- saves ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_partial_sums(tmp_path: Path, mesh: Any, placement: Any) -> None:
    sums = DTensor.from_local(VALUES, mesh, [Partial()])
    refused(
        lambda: ckptcore.save(tmp_path / "c", {"w": sums}),
        f"w: cannot save a DTensor with the placement {Partial()}, as of partial sums; "
        "call .redistribute() with Replicate()",
    )
    ckptcore.save(tmp_path / "c", {"w": sums.redistribute(mesh, [placement])})
    assert same_value(ckptcore.load(tmp_path / "c", framework="torch")["w"], VALUES)


@pytest.mark.parametrize(
    ("make", "text", "follow", "expected"),
    [
        (
            lambda: torch.masked.MaskedTensor(VALUES, VALUES > 2),
            "is two arrays; save its .get_data() and .get_mask()",
            lambda tensor: [tensor.get_data(), tensor.get_mask()],
            [VALUES, VALUES > 2],
        ),
        (
            lambda: torch.arange(4).view(torch.bits16),
            "whose bits have no defined meaning; save tensor.view(torch.uint8)",
            lambda tensor: tensor.view(torch.uint8),
            torch.arange(4).view(torch.uint8),
        ),
    ],
)
def test_tensors_that_are_not_plain_arrays(tmp_path: Path, make: Any, text: str, follow: Any, expected: Any) -> None:
    refused(lambda: ckptcore.save(tmp_path / "c", {"w": make()}), "w: ", text)
    ckptcore.save(tmp_path / "c", {"w": follow(make())})
    assert same_value(ckptcore.load(tmp_path / "c", framework="torch")["w"], expected)


def halves() -> torch.Tensor:
    return torch.quantize_per_channel(VALUES, torch.ones(2), torch.zeros(2), 0, torch.quint4x2)


@pytest.mark.parametrize(
    ("make", "text", "follow"),
    [
        (halves, "torch.quint4x2 has several elements in a byte; save its .dequantize()", torch.dequantize),
        (
            halves,
            "or quantize it to torch.qint8",
            lambda tensor: torch.quantize_per_channel(
                tensor.dequantize(), torch.ones(2), torch.zeros(2), 0, torch.qint8
            ),
        ),
        (
            VALUES.to_mkldnn,
            "the layout torch._mkldnn is not one array of elements; save its .to_dense()",
            torch.Tensor.to_dense,
        ),
    ],
)
def test_tensors_in_other_layouts(tmp_path: Path, make: Any, text: str, follow: Any) -> None:
    refused(lambda: ckptcore.save(tmp_path / "c", {"w": make()}), "w: ", text)
    followed = follow(make())
    ckptcore.save(tmp_path / "c", {"w": followed})
    loaded = ckptcore.load(tmp_path / "c", {"w": followed})["w"]
    assert same_value(loaded.dequantize() if loaded.is_quantized else loaded, VALUES)


def test_dtypes_of_a_newer_ml_dtypes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": VALUES.to(torch.float8_e8m0fnu)}
    with monkeypatch.context() as old:
        old.delitem(conversions._BY_TORCH, torch.float8_e8m0fnu)  # as if the installed ml_dtypes lacked the dtype
        refused(
            lambda: ckptcore.save(tmp_path / "c", state),
            "w: torch.float8_e8m0fnu needs a newer ml_dtypes than the installed one: upgrade ml-dtypes, or save a",
        )
        ckptcore.save(tmp_path / "view", {"w": state["w"].view(torch.uint8)})
        loaded = ckptcore.load(tmp_path / "view", framework="torch")["w"]
        assert same_value(loaded.view(torch.float8_e8m0fnu).float(), state["w"].float())
    ckptcore.save(tmp_path / "c", state)  # with the newer ml_dtypes
    assert same_value(ckptcore.load(tmp_path / "c", state)["w"].float(), state["w"].float())


# --- loads ------------------------------------------------------------------------------------------------------------


def test_dtypes_whose_bits_have_no_meaning(tmp_path: Path) -> None:
    packed = torch.arange(4, dtype=torch.uint8).view(torch.uint4)
    for name, saved, wrong in (("packed", packed, torch.zeros(4)), ("plain", torch.zeros(4), packed)):
        ckptcore.save(tmp_path / name, {"w": saved})
        refused(
            lambda name=name, wrong=wrong: ckptcore.load(  # type: ignore[misc]  # binds loop variables
                tmp_path / name, {"w": wrong}, matching=ckptcore.Matching(cast="truncating")
            ),
            "(torch.uint4)",
            "arrays of these kinds are not cast",
            "Change the requested tree to match the stored one (metadata(location).abstract)",
        )
    stored: Any = ckptcore.metadata(tmp_path / "packed").abstract
    for abstract in (stored, {"w": torch.empty(4, dtype=torch.uint8)}):
        assert np.array_equal(ckptcore.load(tmp_path / "packed", abstract)["w"], [0, 1, 2, 3])
    assert bits(ckptcore.load(tmp_path / "packed", {"w": packed})["w"].view(torch.uint8)) == bits(
        packed.view(torch.uint8)
    )
    assert np.array_equal(
        ckptcore.load(tmp_path / "plain", ckptcore.metadata(tmp_path / "plain").abstract)["w"], [0] * 4
    )


def own_of(part: dict[str, Any]) -> torch.Tensor:
    """Create a sparse or quantized tensor from its parts, without ckptcore."""
    if "scale" in part:
        integers = torch.from_numpy(part["integers"])
        return torch._make_per_tensor_quantized_tensor(integers, part["scale"], part["zero_point"])
    indices, values = torch.from_numpy(part["indices"]), torch.from_numpy(part["values"])
    return torch.sparse_coo_tensor(indices, values, (2, 3), check_invariants=True).coalesce()


@pytest.mark.parametrize(
    ("make", "wrong", "text"),
    [
        (quantized, lambda: quantized(torch.quint8), "type: torch.quint8 is requested, torch.qint8 is stored"),
        (
            quantized,
            lambda: torch.quantize_per_tensor(VALUES[:1], 0.5, 1, torch.qint8),
            "shape: [1, 3] is requested, [2, 3] is",
        ),
        (VALUES.to_sparse, VALUES.to_sparse_csr, "type: torch.sparse_csr is requested, torch.sparse_coo is stored"),
    ],
)
def test_parts_of_another_tensor(
    tmp_path: Path, make: Callable[[], torch.Tensor], wrong: Callable[[], torch.Tensor], text: str
) -> None:
    saved = make()
    ckptcore.save(tmp_path / "c", {"w": saved})
    remedy = "; create the tensor as it was when it was saved, or load its parts without it, as a dict"
    refused(lambda: ckptcore.load(tmp_path / "c", {"w": wrong()}), f"w: {text}", remedy)
    like = quantized(scale=0.25) if saved.is_quantized else (VALUES * 0).to_sparse()
    assert bits(ckptcore.load(tmp_path / "c", {"w": like})["w"]) == bits(saved)
    assert bits(own_of(ckptcore.load(tmp_path / "c")["w"])) == bits(saved)


@pytest.mark.parametrize("make", [quantized, VALUES.to_sparse, lambda: scaled(1)])
def test_parts_of_a_plain_tensor(tmp_path: Path, make: Callable[[], torch.Tensor]) -> None:
    ckptcore.save(tmp_path / "c", {"w": VALUES})
    refused(
        lambda: ckptcore.load(tmp_path / "c", {"w": make()}),
        "are requested, an array of float32 is stored; request what is stored, such as a plain tensor, and convert it",
    )
    assert same_value(ckptcore.load(tmp_path / "c", {"w": torch.zeros(2, 3)})["w"], VALUES)


def test_sparse_elements_of_another_dtype(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": VALUES.to_sparse()})
    refused(
        lambda: ckptcore.load(tmp_path / "c", {"w": VALUES.double().to_sparse()}),
        "w: values: float64 is requested, float32 is stored: request a tensor of the stored dtype",
    )
    assert bits(ckptcore.load(tmp_path / "c", {"w": (VALUES * 0).to_sparse()})["w"]) == bits(VALUES.to_sparse())


def test_parts_of_another_block_size(tmp_path: Path) -> None:
    saved, other = scaled(1), scaled(2)
    other.scale = torch.rand(2, 1)
    ckptcore.save(tmp_path / "c", {"w": saved})
    refused(
        lambda: ckptcore.load(tmp_path / "c", {"w": other}),
        "w: scale: float32[2, 1] is requested, float32[4, 1] is stored: create the tensor with the block size and",
    )
    assert bits(ckptcore.load(tmp_path / "c", {"w": scaled(3)})["w"]) == bits(saved)


def test_devices_and_shapes_of_fake_tensors(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": VALUES})
    with FakeTensorMode():
        elsewhere = torch.empty(2, 3, device="xpu")
    refused(
        lambda: ckptcore.load(tmp_path / "c", {"w": elsewhere}),
        "cannot load a tensor to xpu:0: this process has no such device; request one on the CPU with a tensor on the",
        "or use an available device",
    )
    with FakeTensorMode():
        here = torch.empty(2, 3, device="cpu")
    with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False) as mode:
        symbolic = mode.from_tensor(VALUES, static_shapes=False)
    refused(lambda: ckptcore.load(tmp_path / "c", {"w": symbolic}), "has no fixed shape; create it with static shapes")
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        static = mode.from_tensor(VALUES, static_shapes=True)
    for like in (torch.empty(2, 3, device="meta"), here, static):
        assert same_value(ckptcore.load(tmp_path / "c", {"w": like}), {"w": VALUES})


def test_dtypes_that_torch_lacks(tmp_path: Path) -> None:
    times = np.arange(3).astype("datetime64[s]")
    ckptcore.save(tmp_path / "c", {"w": times})
    like = torch.zeros(3, dtype=torch.int64)
    refused(lambda: ckptcore.load(tmp_path / "c", {"w": like}), "w: dtype: int64[3] is requested, datetime64[s][3] is")
    for request in (AbstractArray((3,), "datetime64[s]"), ckptcore.metadata(tmp_path / "c").abstract["w"]):
        assert np.array_equal(ckptcore.load(tmp_path / "c", {"w": request})["w"], times)


def test_complex_numbers_as_abstract_arrays(tmp_path: Path) -> None:
    """The core refuses the cast to real numbers. A load into a complex tensor gives the real parts."""
    ckptcore.save(tmp_path / "c", {"w": torch.complex(VALUES, VALUES)})
    refused(lambda: ckptcore.load(tmp_path / "c", {"w": AbstractArray((2, 3), "float32")}), "no cast from complex64")
    assert same_value(ckptcore.load(tmp_path / "c", {"w": torch.zeros(2, 3, dtype=torch.complex64)})["w"].real, VALUES)


# --- jobs -------------------------------------------------------------------------------------------------------------


def in_job(store: Any, rank: int, seconds: float) -> Context:
    return Context(job=JobOptions(coordinator=StoreCoordinator(store, rank, 2, timeout_seconds=seconds)))


def test_late_ranks(tmp_path: Path) -> None:
    refused(
        lambda: ckptcore.save(tmp_path / "c", {"w": VALUES}, context=in_job(dist.HashStore(), 0, 0.01)),
        "1 of 2 ranks did not reach the exchange ",
        "within 0.01 s: [1]; check their logs. If they were only late, set Context(job=JobOptions(coordinator=Store",
    )
    store = dist.HashStore()

    def save(rank: int) -> None:
        ckptcore.save(tmp_path / "c", {"w": VALUES}, context=in_job(store, rank, 60))

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(save, range(2)))
    assert same_value(ckptcore.load(tmp_path / "c", framework="torch")["w"], VALUES)


def test_the_timeout_of_a_job(tmp_path: Path, mesh: Any) -> None:
    """Calls the function that the error proposes."""
    del mesh
    context = Context(job=JobOptions(coordinator=StoreCoordinator.of_job(timeout_seconds=60)))
    ckptcore.save(tmp_path / "c", {"w": VALUES}, context=context)
    assert same_value(ckptcore.load(tmp_path / "c", framework="torch", context=context)["w"], VALUES)


@pytest.mark.system
def test_a_store_whose_server_ended(tmp_path: Path) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = server.port
    client = dist.TCPStore("127.0.0.1", port, is_master=False)
    del server
    refused(
        lambda: ckptcore.save(tmp_path / "c", {"w": VALUES}, context=in_job(client, 1, 60)),
        "the store of the job failed in the exchange ",
        "; it runs in the launcher (torchrun) or in the process of rank 0: check that this is running",
    )
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    stores = [dist.TCPStore("127.0.0.1", port, is_master=False) for _ in range(2)]

    def save(rank: int) -> None:
        ckptcore.save(tmp_path / "c", {"w": VALUES}, context=in_job(stores[rank], rank, 60))

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(save, range(2)))
    del server
    assert same_value(ckptcore.load(tmp_path / "c", framework="torch")["w"], VALUES)
