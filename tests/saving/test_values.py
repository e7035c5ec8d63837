"""Values that programs put into a training state, in every layout: with a template, in place, and without."""

from __future__ import annotations

import collections
import copy
import datetime
import decimal
import enum
import fractions
import io
import ipaddress
import pathlib
import uuid
import zoneinfo
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np
import pytest
import torch

import ckptcore
from ckptcore.errors import TreeMismatchError, UnsupportedKeyError, UnsupportedLeafError

LAYOUTS = ("zarr3", "ocdbt", "dcp", "safetensors")


class Color(enum.Enum):
    RED = "r"
    BLUE = (1, 2)


class Stage(enum.IntEnum):
    WARM = 1
    MAIN = 2


class Split(enum.StrEnum):
    TRAIN = "train"
    TEST = "test"


class Flags(enum.Flag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: Any
    y: Any = None


@dataclass
class Data:
    x: Any
    y: Any = None


@dataclass(frozen=True)
class Frozen:
    x: Any


@attrs.define
class Attrs:
    x: Any
    y: Any = None


@attrs.frozen
class FrozenAttrs:
    x: Any


class Window(collections.deque[Any]):
    """A subclass with an additional attribute."""

    name = ""


def window(elements: Any, name: str) -> Window:
    made = Window(elements, maxlen=4)
    made.name = name
    return made


BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
UTC = datetime.timezone.utc  # noqa: UP017  # the object is compared
UUID = uuid.UUID(int=7)

VALUES: dict[str, tuple[Any, Any, Any]] = {
    # name: (value, template with another value, result of a load without a template)
    "none": (None, None, None),
    "bool": (True, False, True),
    "int": (1 << 70, 0, 1 << 70),
    "float": (0.1, 0.0, 0.1),
    "complex": (1 + 2j, 0j, 1 + 2j),
    "str": ("a\ud800", "", "a\ud800"),
    "long str": ("ä" * 9999, "", "ä" * 9999),
    "bytes": (b"\0\xff", b"", b"\0\xff"),
    "bytearray": (bytearray(b"\0\xff"), bytearray(), b"\0\xff"),
    "long bytearray": (bytearray(b"\1" * 99_999), bytearray(), b"\1" * 99_999),
    "path": (Path("/data/run 1"), Path("x"), "/data/run 1"),
    "pure path": (pathlib.PureWindowsPath("C:/a"), pathlib.PureWindowsPath("b"), "C:\\a"),
    "path of any bytes": (Path("a\udcff"), Path(), "a\udcff"),
    "datetime": (datetime.datetime(2024, 1, 2, 3, 4, 5, 6), datetime.datetime(1, 1, 1), "2024-01-02T03:04:05.000006"),
    "datetime in UTC": (
        datetime.datetime(2024, 1, 2, tzinfo=UTC),
        datetime.datetime(1, 1, 1),
        "2024-01-02T00:00:00+00:00",
    ),
    "datetime in a zone": (
        datetime.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=BERLIN),
        datetime.datetime(1, 1, 1),
        "2024-10-27T02:30:00+01:00[Europe/Berlin]",
    ),
    "datetime with fold": (
        datetime.datetime(2024, 1, 2, fold=1),
        datetime.datetime(1, 1, 1),
        "2024-01-02T00:00:00[fold]",
    ),
    "date": (datetime.date(2024, 1, 2), datetime.date(1, 1, 1), "2024-01-02"),
    "time": (datetime.time(1, 2, 3, 4, tzinfo=UTC), datetime.time(), "01:02:03.000004+00:00"),
    "timedelta": (datetime.timedelta(-1, 2, 3), datetime.timedelta(), [-1, 2, 3]),
    "decimal": (decimal.Decimal("1.10"), decimal.Decimal(0), "1.10"),
    "fraction": (fractions.Fraction(1, 3), fractions.Fraction(0), "1/3"),
    "uuid": (UUID, uuid.UUID(int=0), str(UUID)),
    "address": (ipaddress.ip_address("::1"), ipaddress.ip_address("::2"), "::1"),
    "network": (ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("0.0.0.0/0"), "10.0.0.0/8"),
    "enum": (Color.BLUE, Color.RED, "BLUE"),
    "int enum": (Stage.MAIN, Stage.WARM, "MAIN"),
    "str enum": (Split.TEST, Split.TRAIN, "TEST"),
    "flag": (Flags.A | Flags.B, Flags.A, 3),
    "no flag": (Flags(0), Flags.A, 0),
    "range": (range(1, 1 << 60, 3), range(0), [1, hex(1 << 60), 3]),
    "frozenset": (frozenset({1, 2, "a", (3, None)}), frozenset(), [1, 2, [3, None], "a"]),
    "set": ({3, 1, 2}, {9}, [1, 2, 3]),
    "set of many types": ({1, "a", None, (2, "b"), b"c"}, set(), [None, b"c", 1, "a", (2, "b")]),
    "set of numpy": ({np.int64(2), np.int64(1)}, set(), [1, 2]),
    "empty set": (set(), {1}, []),
    "deque": (collections.deque([1, 2.5, None]), collections.deque(), [1, 2.5, None]),
    "deque with maxlen": (collections.deque([1, 2], maxlen=4), collections.deque([7], maxlen=4), [1, 2]),
    "deque of a subclass": (window([1], "a"), window([2, 3], "a"), [1]),
    "numpy scalar": (np.float32(0.1), np.float32(0), np.float32(0.1)),
    "numpy text": (np.str_("ä"), np.str_("b"), np.str_("ä")),
    "numpy time": (np.datetime64("2024-01-02T03"), np.datetime64("2000-01-01T01"), np.datetime64("2024-01-02T03")),
    "numpy dtype": (np.dtype("float32"), np.dtype("int8"), "float32"),
    "torch dtype": (torch.bfloat16, torch.float32, "torch.bfloat16"),
    "torch device": (torch.device("cuda:1"), torch.device("cpu"), "cuda:1"),
    "torch layout": (torch.sparse_coo, torch.strided, "torch.sparse_coo"),
    "torch memory format": (torch.channels_last, torch.preserve_format, "torch.channels_last"),
    "torch size": (torch.Size([2, 3]), torch.Size([0, 0]), (2, 3)),
    "named tuple": (Point(1, None), Point(0), {"x": 1, "y": None}),
    "dataclass": (Data(1, "a"), Data(0, ""), {"x": 1, "y": "a"}),
    "frozen dataclass": (Frozen(1), Frozen(0), {"x": 1}),
    "attrs": (Attrs(1, "a"), Attrs(0, ""), {"x": 1, "y": "a"}),
    "frozen attrs": (FrozenAttrs(1), FrozenAttrs(0), {"x": 1}),
    "ordered dict": (
        collections.OrderedDict(b=1, a=2),
        collections.OrderedDict(b=0, a=0),
        collections.OrderedDict(b=1, a=2),
    ),
    "default dict": (collections.defaultdict(int, a=1), collections.defaultdict(int, a=0), {"a": 1}),
    "counter": (collections.Counter("aab"), collections.Counter("ab"), {"a": 2, "b": 1}),
    "keys of numpy": ({np.int64(3): 1, np.str_("a"): 2}, {np.int64(3): 0, np.str_("a"): 0}, {3: 1, "a": 2}),
    "keys of enums": ({Stage.MAIN: 1, Split.TEST: 2}, {Stage.MAIN: 0, Split.TEST: 0}, {2: 1, "test": 2}),
    "plain keys for those of enums": ({2: 1, "test": 2}, {Stage.MAIN: 0, Split.TEST: 0}, {2: 1, "test": 2}),
}


def assert_equal(actual: Any, expected: Any) -> None:
    """Compare types and values, also of keys and of time zones."""
    assert type(actual) is type(expected)
    assert actual == expected
    if isinstance(expected, dict):
        assert list(map(type, actual)) in (list(map(type, expected)), [Stage, Split])
    if isinstance(expected, datetime.datetime | datetime.time):
        assert (actual.fold, str(actual.tzinfo)) == (expected.fold, str(expected.tzinfo))
    if isinstance(expected, collections.deque):
        assert actual.maxlen == expected.maxlen and getattr(actual, "name", "") == getattr(expected, "name", "")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.brings("paths, times, enum members, sets, ranges, dtypes and others", "Python", "same")
def test_every_value_comes_back_as_its_type_or_in_its_plain_form(layout: str, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {name: value for name, (value, _, _) in VALUES.items()}, layout=layout)
    plain = ckptcore.load(tmp_path / "c")
    templates = {name: copy.deepcopy(template) for name, (_, template, _) in VALUES.items()}
    loaded = ckptcore.load(tmp_path / "c", templates)
    abstract = ckptcore.abstract({name: value for name, (value, _, _) in VALUES.items()})
    again = ckptcore.load(tmp_path / "c", abstract)
    for name, (value, template, form) in VALUES.items():
        assert plain[name] == form and type(plain[name]) is type(form), name
        assert_equal(loaded[name], value)
        assert_equal(again[name], value)
        assert templates[name] == template, "a template is not changed"
    targets = {name: copy.deepcopy(template) for name, (_, template, _) in VALUES.items()}
    before = dict(targets)
    ckptcore.load_into(tmp_path / "c", targets)
    for name, (value, _, _) in VALUES.items():
        assert_equal(targets[name], value)
        if isinstance(value, set | collections.deque | dict | Data | Attrs):
            assert targets[name] is before[name], name


def test_values_are_saved_as_they_are_when_an_asynchronous_save_returns(tmp_path: Path) -> None:
    state = {"deque": collections.deque([1, 2]), "set": {1}, "bytes": bytearray(b"a" * 99_999), "io": io.BytesIO(b"b")}
    saved = ckptcore.save_async(tmp_path / "c", state)
    state["deque"].append(3)  # type: ignore[attr-defined]
    state["set"].add(2)  # type: ignore[attr-defined]
    state["bytes"][:] = b"c" * 99_999  # type: ignore[index]
    saved.result(timeout=120)
    assert ckptcore.load(tmp_path / "c") == {"deque": [1, 2], "set": [1], "bytes": b"a" * 99_999, "io": b"b"}


class Holder:
    """An object whose state can be any dict."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_an_object_gets_values_of_its_own_types_or_else_plain_forms(tmp_path: Path) -> None:
    state = {"path": Path("/a"), "stage": Stage.MAIN, "recent": collections.deque([1, 2], maxlen=3), "seen": {1, 2}}
    ckptcore.save(tmp_path / "c", {"holder": Holder(**state)})
    typed = Holder(path=Path(), stage=Stage.WARM, recent=collections.deque(maxlen=3), seen=set())
    ckptcore.load_into(tmp_path / "c", {"holder": typed})
    assert typed.state == state
    new = Holder()
    ckptcore.load_into(tmp_path / "c", {"holder": new})
    assert new.state == {"path": "/a", "stage": "MAIN", "recent": [1, 2], "seen": [1, 2]}


def test_text_loads_as_the_requested_type_and_the_reverse(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "text", {"a": "/x"})
    ckptcore.save(tmp_path / "path", {"a": Path("/x")})
    assert ckptcore.load(tmp_path / "text", {"a": Path()}) == {"a": Path("/x")}
    assert ckptcore.load(tmp_path / "path", {"a": ""}) == {"a": "/x"}


class Other(enum.Enum):
    GREEN = 1


@pytest.mark.parametrize(
    ("stored", "requested", "message"),
    [
        (Color.RED, Other.GREEN, "a: kind: the stored enum 'RED' is no Other"),
        (1, Path(), "a: kind: the stored int '1' is no PosixPath"),
        (Path("/x"), 1, "a: kind: int is requested, path is stored"),
        (Path("/x"), uuid.UUID(int=0), "a: kind: the stored path '/x' is no UUID"),
        (np.ones(2), Path(), r"a: kind: path is requested, array float64\[2\] is stored"),
        (Path("/x"), np.ones(2), r"a: kind: array float64\[2\] is requested, path is stored"),
        (collections.deque(range(5)), collections.deque(maxlen=3), "a: 5 elements are stored, .* maxlen=5 or more"),
        ({"k": 1}, {1}, "a: a set is requested, a dict is stored"),
    ],
)
def test_a_value_of_another_type_is_refused_before_anything_changes(
    stored: Any, requested: Any, message: str, tmp_path: Path
) -> None:
    ckptcore.save(tmp_path / "c", {"a": stored, "w": np.ones(3)})
    target = {"a": requested, "w": np.zeros(3)}
    with pytest.raises(TreeMismatchError, match=message):
        ckptcore.load_into(tmp_path / "c", target)
    assert not target["w"].any()


def _refused_set() -> Any:
    return {Path("a")}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: {(1, None): 3}, UnsupportedKeyError, r"a has the key \(1, None\) .*list\(value.items\(\)\)"),
        (lambda: {Color.RED: 3}, UnsupportedKeyError, "a has the key <Color.RED"),
        (_refused_set, UnsupportedLeafError, "a: a set with a pathlib.*save a list of its elements"),
        (lambda: frozenset({b"a"}), UnsupportedLeafError, r"a: a frozenset with a bytes .*save list\(value\)"),
        (lambda: np.dtype(">f4"), UnsupportedLeafError, "a: a dtype of the other byte order"),
        (
            lambda: datetime.datetime(2024, 1, 2, tzinfo=Strange()),
            UnsupportedLeafError,
            r"a: a datetime with the time zone .*astimezone\(datetime.timezone.utc\)",
        ),
    ],
)
def test_values_that_would_lose_information_are_refused(
    make: Callable[[], Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        ckptcore.save(tmp_path / "c", {"a": make()})
    assert not (tmp_path / "c").exists()


class Strange(datetime.tzinfo):
    """A time zone without a name."""

    def utcoffset(self, _: Any) -> datetime.timedelta:
        return datetime.timedelta(hours=1)

    def dst(self, _: Any) -> None:
        return None

    def tzname(self, _: Any) -> None:
        return None


def test_the_remedies_of_refused_values_keep_everything(tmp_path: Path) -> None:
    moment = datetime.datetime(2024, 1, 2, tzinfo=Strange())
    pairs = {(1, 2): 3, (4, 5): 6}
    state = {
        "moment": moment.astimezone(datetime.timezone.utc),  # noqa: UP017  # the code of the remedy
        "pairs": list(pairs.items()),
        "paths": [Path("a")],
        "frozen": list(frozenset({b"a"})),
    }
    ckptcore.save(tmp_path / "c", state)
    loaded = ckptcore.load(tmp_path / "c", state)
    assert loaded["moment"] == moment
    assert dict(loaded["pairs"]) == pairs
    assert loaded["paths"] == [Path("a")] and frozenset(loaded["frozen"]) == {b"a"}
