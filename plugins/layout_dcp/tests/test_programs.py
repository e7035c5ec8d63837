"""Programs of PyTorch: files of TorchScript and of ``torch.export.save``. PyTorch writes them."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import ckptcore
from ckptcore.errors import CheckpointError, CorruptCheckpointError

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning"),
    pytest.mark.filterwarnings("ignore:No complete tensor found in the group"),
]

writes_archives = pytest.mark.skipif(
    not hasattr(torch, "float4_e2m1fn_x2"), reason="PyTorch before 2.8 writes other archives of programs"
)


class Scripted(torch.nn.Module):
    """A module with attributes of every list and dict type that TorchScript supports."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)
        self.register_buffer("steps", torch.arange(3))
        self.sizes = [1, 2]
        self.rates = [0.5]
        self.flags = [True, False]
        self.names = ["a", "b"]
        self.nested = {"x": [[1], [2, 3]]}
        self.pair = (1, "x")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x) * len(self.sizes)
        return output


class Offset(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x) + torch.arange(4)
        return output


def test_attributes_of_torchscript_are_plain_values(tmp_path: Path) -> None:
    module = torch.jit.script(Scripted())
    torch.jit.save(module, tmp_path / "module.pt")
    metadata, loaded = ckptcore.metadata(tmp_path / "module.pt"), ckptcore.load(tmp_path / "module.pt")
    assert metadata.writer == "TorchScript (torch.jit.save)"
    assert (loaded["sizes"], loaded["rates"], loaded["flags"], loaded["names"]) == (
        [1, 2],
        [0.5],
        [True, False],
        ["a", "b"],
    )
    assert (loaded["nested"], loaded["pair"]) == ({"x": [[1], [2, 3]]}, (1, "x"))
    for name, tensor in module.state_dict().items():
        value = loaded
        for key in name.split("."):
            value = value[key]
        np.testing.assert_array_equal(value, tensor.numpy())
    ckptcore.copy(tmp_path / "module.pt", tmp_path / "copy", layout="safetensors")
    np.testing.assert_equal(ckptcore.load(tmp_path / "copy"), loaded)


def test_weights_of_a_frozen_module_are_constants(tmp_path: Path) -> None:
    module = Offset().eval()
    frozen = torch.jit.freeze(torch.jit.script(module))
    torch.jit.save(frozen, tmp_path / "frozen.pt")
    constants = ckptcore.load(tmp_path / "frozen.pt")["CONSTANTS"]
    contents = {constant.tobytes() for constant in constants}
    assert {tensor.numpy().tobytes() for tensor in module.state_dict().values()} <= contents
    assert ckptcore.verify(tmp_path / "frozen.pt").state == "sound"


@writes_archives
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_an_exported_program(tmp_path: Path, dtype: torch.dtype) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).eval().to(dtype)
    layers[0].weight = torch.nn.Parameter(torch.randn(3, 4, dtype=dtype).t())
    torch.export.save(torch.export.export(layers, (torch.ones(2, 3, dtype=dtype),)), tmp_path / "program.pt2")
    metadata, loaded = ckptcore.metadata(tmp_path / "program.pt2"), ckptcore.load(tmp_path / "program.pt2")
    assert metadata.writer == "torch.export.save"
    state = layers.state_dict()
    assert set(loaded) == set(state)
    for name, tensor in state.items():
        np.testing.assert_array_equal(loaded[name].astype(np.float64), tensor.double().numpy())
    assert ckptcore.verify(tmp_path / "program.pt2").state == "sound"
    ckptcore.load_into(tmp_path / "program.pt2", other := torch.nn.Sequential(*layers))
    assert all(torch.equal(tensor, state[name]) for name, tensor in other.state_dict().items())


@writes_archives
@pytest.mark.parametrize(
    "change",
    [
        {"dtype": 99},
        {"layout": 1},
        {"sizes": [{"as_int": 1 << 61}, {"as_int": 3}]},
        {"sizes": [{"as_int": -1}]},
        {"sizes": [{"as_int": "3"}], "strides": [{"as_int": 1}]},
        {"strides": [{"as_int": 1 << 40}, {"as_int": 1}]},
        {"storage_offset": {"as_int": 1 << 40}},
    ],
)
def test_a_hostile_list_of_weights_is_an_error(tmp_path: Path, change: dict[str, object]) -> None:
    layer = torch.nn.Linear(3, 4)
    torch.export.save(torch.export.export(layer, (torch.ones(2, 3),)), tmp_path / "program.pt2")
    with zipfile.ZipFile(tmp_path / "program.pt2") as source, zipfile.ZipFile(tmp_path / "bad.pt2", "w") as bad:
        for name in source.namelist():
            data = source.read(name)
            if name.endswith("model_weights_config.json"):
                listed = json.loads(data)
                listed["config"]["weight"]["tensor_meta"].update(change)
                data = json.dumps(listed).encode()
            bad.writestr(name, data)
    with pytest.raises(CheckpointError, match=r"bad\.pt2|weight"):
        ckptcore.load(tmp_path / "bad.pt2")


@writes_archives
def test_a_missing_file_of_a_program_is_damage(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(torch.nn.Linear(3, 4), (torch.ones(2, 3),)), tmp_path / "program.pt2")
    with zipfile.ZipFile(tmp_path / "program.pt2") as source, zipfile.ZipFile(tmp_path / "bad.pt2", "w") as bad:
        for name in source.namelist():
            if not name.endswith("weight_0"):
                bad.writestr(name, source.read(name))
    with pytest.raises(CorruptCheckpointError, match="weight_0' is missing"):
        ckptcore.load(tmp_path / "bad.pt2")


def damage(path: Path, member: str) -> None:
    """Change a byte in the middle of a member of a zip."""
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if member in name)
        stored = archive.read(name)
        content = path.read_bytes()
        at = content.index(stored, archive.getinfo(name).header_offset) + len(stored) // 2
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])


@pytest.mark.parametrize("member", ["data.pkl", "/code/", "data/0", "version"])
def test_verify_compares_every_member_of_a_program(tmp_path: Path, member: str) -> None:
    torch.jit.save(torch.jit.script(Offset()), tmp_path / "module.pt")
    with zipfile.ZipFile(tmp_path / "module.pt") as archive:
        if not any(member in name and archive.getinfo(name).compress_type == 0 for name in archive.namelist()):
            with zipfile.ZipFile(tmp_path / "stored.pt", "w", zipfile.ZIP_STORED) as copy:
                for name in archive.namelist():
                    copy.writestr(name, archive.read(name))
            (tmp_path / "stored.pt").rename(tmp_path / "module.pt")
    assert ckptcore.verify(tmp_path / "module.pt").ok
    damage(tmp_path / "module.pt", member)
    try:
        assert not ckptcore.verify(tmp_path / "module.pt").ok
    except CorruptCheckpointError:
        assert member == "data.pkl"  # this member describes the tree


def test_verify_compares_members_that_no_tensor_uses(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(100.0)}, tmp_path / "w.pt")
    with zipfile.ZipFile(tmp_path / "w.pt", "a", zipfile.ZIP_STORED) as archive:
        archive.writestr("w/data/7", b"unused")
    assert ckptcore.verify(tmp_path / "w.pt").ok
    damage(tmp_path / "w.pt", "data/7")
    assert not ckptcore.verify(tmp_path / "w.pt").ok
