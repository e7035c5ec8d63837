"""Hyperparameters of Lightning: any type can be saved, safe types are restored, and modules get them as arguments."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import ipaddress
import json
import os
import pathlib
import types
import uuid
import zoneinfo
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import lightning
import numpy as np
import pytest
import torch
from ckptcore_integrations.lightning import CkptcoreIO
from lightning.fabric.utilities.data import AttributeDict
from omegaconf import DictConfig, ListConfig, OmegaConf

import ckptcore
from plugins.integrations.tests.trainers.lightning_program import Digits, fit, loader, same, trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns about CPUs, workers, loggers and its own functions


class Mode(enum.Enum):
    FAST = "fast"
    EXACT = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


class Bits(enum.IntFlag):
    A = 1


class KeptBits(enum.Flag, boundary=enum.KEEP):
    A = 1


class Parts(enum.Flag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: int
    y: Any


@dataclasses.dataclass(frozen=True)
class Config:
    lr: float
    path: Path = Path("a")

    def __post_init__(self) -> None:
        assert self.lr != "never", "called by a load"


@dataclasses.dataclass(slots=True)
class Slotted:
    names: set[str]


@attrs.frozen
class Attrs:
    mode: Mode


class Name(str):
    """A subclass of `str`."""

    __slots__ = ()


SAME: dict[str, Any] = {
    "path": Path("/data/run"),
    "pure path": pathlib.PureWindowsPath("C:/a"),
    "enum": Mode.EXACT,
    "int enum": Level.LOW,
    "flags": Parts.A | Parts.B,
    "flag without a member": Parts(0),
    "set": {1, "a", (2, Mode.FAST)},
    "frozenset": frozenset({1.5}),
    "tuple": (1, [2, (3, Path("b"))]),
    "range": range(1, 9, 2),
    "slice": slice(None, 5),
    "bytes": b"\0\xff",
    "bytearray": bytearray(b"ab"),
    "complex": 1 + 2j,
    "nan and infinity": [float("inf"), -float("inf")],
    "large int": 1 << 90,
    "datetime": datetime.datetime(2024, 1, 2, 3, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    "datetime in UTC": datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC),
    "date": datetime.date(2024, 1, 2),
    "time": datetime.time(1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=1), "A")),
    "timedelta": datetime.timedelta(-1, 2, 3),
    "decimal": decimal.Decimal("1.10"),
    "fraction": fractions.Fraction(1, 3),
    "uuid": uuid.UUID(int=7),
    "address": ipaddress.ip_network("10.0.0.0/8"),
    "torch dtype": torch.bfloat16,
    "torch device": torch.device("cuda:1"),
    "torch size": torch.Size([2, 3]),
    "torch layout": torch.sparse_coo,
    "tensor": torch.arange(3),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "array": np.arange(6, dtype=np.uint16).reshape(2, 3),
    "array of text": np.array(["a", "bc"]),
    "scalar array": np.array(1.5),
    "numpy scalar": np.float32(0.1),
    "numpy dtype": np.dtype("<f4"),
    "dict with other keys": {1: "a", (2, Mode.FAST): {None: Path("c")}, 1.5: 2},
    "ordered dict": collections.OrderedDict(b=1, a=Path("d")),
    "deque": collections.deque([1, 2], maxlen=3),
    "namespace": argparse.Namespace(a=1, b=Path("e")),
    "simple namespace": types.SimpleNamespace(a={1}),
    "attribute dict": AttributeDict(a=1),
    "named tuple": Point(1, {2}),
    "dataclass": Config(0.1),
    "dataclass with slots": Slotted({"a"}),
    "attrs": Attrs(Mode.FAST),
    "DictConfig": OmegaConf.create({"a": {"b": 1}, "c": "${a.b}", "d": ["x"]}),
    "ListConfig": OmegaConf.create([1, {"a": 2}]),
    "empty": [{}, [], (), set()],
    "deep": functools.reduce(lambda inner, _: [inner], range(40), Path("f")),
}


class Refuses:
    """An object whose `repr` fails."""

    def __repr__(self) -> str:
        raise RuntimeError


CYCLE: list[Any] = []
CYCLE.append(CYCLE)

TEXT: dict[str, tuple[Any, Any]] = {
    "class": (torch.nn.ReLU, "torch.nn.modules.activation.ReLU"),
    "function": (torch.nn.functional.mse_loss, "torch.nn.functional.mse_loss"),
    "built-in function": (len, "len"),
    "module": (torch.nn.Linear(1, 2), "Linear(in_features=1, out_features=2, bias=True)"),
    "optimizer": (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), None),
    "partial": (functools.partial(int, base=2), "functools.partial(<class 'int'>, base=2)"),
    "object that cannot be shown": (Refuses(), None),
    "cycle": (CYCLE, [None]),
    "very deep": (functools.reduce(lambda inner, _: [inner], range(200), 1), None),
    "text of a subclass": (Name("a"), "a"),
    "default dict": (collections.defaultdict(list, a=[1]), {"a": [1]}),
    "tensor on the meta device": (torch.ones(1, device="meta"), None),
    "sparse tensor": (torch.eye(2).to_sparse(), None),
    "array of objects": (np.array([object()]), None),
    "flag with a bit without a name": (Bits(8), 8),
    "flag with a member and such a bit": (KeptBits(9), None),
    "generator": (torch.Generator(), None),
    "text in a set": ({len}, {"len"}),
}


def assert_equal(loaded: Any, expected: Any) -> None:
    """Compare types and values."""
    assert type(loaded) is type(expected)
    if isinstance(expected, np.ndarray):
        assert loaded.dtype == expected.dtype
        np.testing.assert_array_equal(loaded, expected)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(loaded, expected)
    else:
        assert loaded == expected
    if isinstance(expected, collections.deque):
        assert loaded.maxlen == expected.maxlen


@pytest.mark.brings("hyperparameters: paths, times, sets, ranges, enums, dtypes, dataclasses", "lightning", "same")
@pytest.mark.brings("hyperparameters: NumPy arrays, tensors, `Namespace`, `DictConfig`", "lightning", "same")
@pytest.mark.parametrize("name", SAME)
def test_hyperparameters_come_back_as_themselves(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    io = CkptcoreIO()
    state = {"hyper_parameters": {"value": SAME[name], "all": [SAME[name]]}, "datamodule_hyper_parameters": {"a": {1}}}
    io.check(state)
    io.save_checkpoint(state, tmp_path / "c")
    loaded = io.load_checkpoint(tmp_path / "c", map_location="cpu")
    assert_equal(loaded["hyper_parameters"]["value"], SAME[name])
    assert_equal(loaded["hyper_parameters"]["all"][0], SAME[name])
    assert loaded["datamodule_hyper_parameters"] == {"a": {1}}
    assert loaded.keys() == state.keys()
    assert not caplog.records
    ckptcore.load(tmp_path / "c")  # a load without the adapter returns a plain form


@pytest.mark.brings("hyperparameters: modules, optimizers, functions, classes (as text)", "lightning", "plain form")
@pytest.mark.parametrize("name", TEXT)
def test_other_hyperparameters_come_back_as_text_with_one_warning(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    io = CkptcoreIO()
    value, expected = TEXT[name]
    state = {"hyper_parameters": {"first": value, "path": Path("a"), "second": value}}
    io.check(state)
    for number in range(2):
        io.save_checkpoint(state, tmp_path / str(number))
    loaded = io.load_checkpoint(tmp_path / "1")["hyper_parameters"]
    assert loaded["path"] == Path("a")
    if isinstance(expected, list):
        assert isinstance(loaded["first"][0], str)
    elif expected is not None:
        assert loaded["first"] == expected
    elif name != "very deep":
        assert isinstance(loaded["first"], str)
    (warning,) = caplog.messages
    assert "hyper_parameters.first" in warning
    assert "hyper_parameters.second" in warning
    assert "save_hyperparameters(ignore=[...])" in warning


def test_objects_of_local_classes_load_in_a_plain_form(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Local(enum.Enum):
        A = 1

    @dataclasses.dataclass
    class Settings:
        lr: float

    io = CkptcoreIO()
    io.save_checkpoint({"hyper_parameters": {"a": Local.A, "b": Settings(1.0)}}, tmp_path / "c")
    assert io.load_checkpoint(tmp_path / "c")["hyper_parameters"] == {"a": "A", "b": {"lr": 1.0}}
    assert "hyper_parameters.a" in caplog.text and "hyper_parameters.b" in caplog.text


def test_arrays_outside_of_hyperparameters_load_as_numpy_arrays(tmp_path: Path) -> None:
    io = CkptcoreIO()
    state = {
        "callbacks": {
            "Sampler": {
                "numpy": np.random.default_rng(1).bit_generator.state,
                "legacy": np.random.RandomState(1).get_state(),
            }
        }
    }
    io.save_checkpoint(state, tmp_path / "c")
    loaded = io.load_checkpoint(tmp_path / "c")["callbacks"]["Sampler"]
    np.random.RandomState().set_state(loaded["legacy"])
    assert type(loaded["legacy"][1]) is np.ndarray
    assert loaded["numpy"] == state["callbacks"]["Sampler"]["numpy"]


HOSTILE: dict[str, Any] = {
    "a function": ["enum:os:system"],
    "a module that is not imported": ["fields:antigravity:Config"],
    "a class with fields that is none": ["fields:subprocess:Popen"],
    "an unknown type": ["builtins.eval"],
    "no path": ["missing", "key", "pathlib.PosixPath"],
    "no text": [7],
    "nothing": [],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_checkpoint_cannot_choose_the_code_that_runs(tmp_path: Path, name: str) -> None:
    path = () if name == "no path" else ("hyper_parameters", "a")
    types_of_values = json.dumps([[*path, *HOSTILE[name]], ["hyper_parameters", "b", "pathlib.PosixPath"]])
    state = {"hyper_parameters": {"a": "true", "b": "x"}, "ckptcore_types": types_of_values}
    ckptcore.save(tmp_path / "c", state)
    assert CkptcoreIO().load_checkpoint(tmp_path / "c") == {"hyper_parameters": {"a": "true", "b": Path("x")}}


def test_a_load_calls_neither_constructors_nor_resolvers_of_the_program(tmp_path: Path) -> None:
    calls: list[str] = []
    OmegaConf.register_new_resolver("call", calls.append, replace=True)
    types_of_values = [
        ["hyper_parameters", "a", f"fields:{__name__}:Config"],
        ["hyper_parameters", "b", "omegaconf.dictconfig.DictConfig"],
    ]
    notes = {"a": {"lr": "never", "path": "x"}, "b": {"c": "${call:1}", "d": "\\${call:1}"}}
    ckptcore.save(tmp_path / "c", {"hyper_parameters": notes, "ckptcore_types": json.dumps(types_of_values)})
    loaded = CkptcoreIO().load_checkpoint(tmp_path / "c")["hyper_parameters"]
    assert type(loaded["a"]) is Config
    assert OmegaConf.to_container(loaded["b"], resolve=True) is not None
    assert (loaded["b"].c, loaded["b"].d) == ("${call:1}", "\\${call:1}")
    assert calls == []


class Described(Digits):
    """The classifier with hyperparameters."""

    def __init__(
        self, width: int = 1, root: Path = Path(), mode: Mode = Mode.FAST, loss: Any = None, **others: Any
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.root, self.mode, self.width, self.loss, self.others = root, mode, width, loss, others


class OfConfig(Digits):
    """The classifier with one argument for all hyperparameters."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.save_hyperparameters(cfg)
        self.cfg = cfg


class Data(lightning.LightningDataModule):  # type: ignore[misc]  # without types here
    """A data module with the batches and with hyperparameters."""

    def __init__(self, root: Path = Path(), sizes: Any = ()) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.root, self.sizes = root, sizes

    def train_dataloader(self) -> Any:
        """Return the batches."""
        return loader()


def test_modules_and_data_are_created_from_hyperparameters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = Described(
        3, Path("/data"), Mode.EXACT, torch.nn.functional.mse_loss, sizes=np.arange(3), layer=torch.nn.ReLU()
    )
    data = Data(Path("/images"), range(3))
    run = trainer(tmp_path, max_steps=4, plugins=[CkptcoreIO(asynchronous=True)])
    run.fit(module, datamodule=data)
    (warning,) = [message for message in caplog.messages if "hyperparameters that a load returns as text" in message]
    assert "hyper_parameters.loss (function), hyper_parameters.layer (torch.nn.modules.activation.ReLU)." in warning
    again = Described.load_from_checkpoint(tmp_path / "last.ckpt", loss=torch.nn.functional.mse_loss, layer=None)
    assert (again.width, again.root, again.mode) == (3, Path("/data"), Mode.EXACT)
    assert again.loss is torch.nn.functional.mse_loss
    np.testing.assert_array_equal(again.others["sizes"], np.arange(3))
    assert type(again.others["sizes"]) is np.ndarray
    assert same(dict(again.state_dict()), dict(module.state_dict()))
    loaded = Data.load_from_checkpoint(os.fspath(tmp_path / "last.ckpt"))
    assert (loaded.root, loaded.sizes) == (Path("/images"), range(3))


@pytest.mark.parametrize(
    "cfg",
    [
        OmegaConf.create({"lr": 1.0, "net": {"width": 3, "again": "${net.width}"}}),
        argparse.Namespace(lr=1.0, root=Path("a")),
        {"lr": 1.0, "root": Path("a")},
    ],
    ids=["DictConfig", "Namespace", "dict"],
)
def test_a_single_argument_for_all_hyperparameters_is_restored(tmp_path: Path, cfg: Any) -> None:
    fit(trainer(tmp_path, max_steps=4, plugins=[CkptcoreIO()]), OfConfig(cfg))
    again = OfConfig.load_from_checkpoint(tmp_path / "last.ckpt")
    if isinstance(cfg, DictConfig | ListConfig):
        assert type(again.cfg) is DictConfig
        assert again.cfg.net.again == 3
    else:
        assert dict(again.cfg) == (vars(cfg) if isinstance(cfg, argparse.Namespace) else cfg)


def test_files_of_lightning_are_opened_as_before(tmp_path: Path) -> None:
    module = fit(trainer(tmp_path, max_steps=4), Described(3))
    again = Described.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=False)
    assert again.width == 3
    assert same(dict(again.state_dict()), dict(module.state_dict()))
    with pytest.raises(FileNotFoundError):
        Described.load_from_checkpoint(tmp_path / "missing.ckpt")
