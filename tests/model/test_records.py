"""Records behave like named tuples and dataclasses of the standard library, and are defined without compiling code."""

from __future__ import annotations

import builtins
import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import field
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

import pytest

from ckptcore import records

T = TypeVar("T")
_OURS: Any = records.dataclass
_TUPLE: Any = records.NamedTuple


class Pair(_TUPLE):  # type: ignore[misc]  # of any base class
    """Two fields and a method."""

    first: int
    second: str = "b"

    def joined(self) -> str:
        return f"{self.first}{self.second}"


class Box(_TUPLE, Generic[T]):  # type: ignore[misc]
    """A generic tuple."""

    content: T


class Standard(NamedTuple):
    """The tuple of the standard library that `Pair` is compared with."""

    first: int
    second: str = "b"


def test_a_tuple_has_fields_defaults_and_methods() -> None:
    pair: Any = Pair(1)
    assert pair == (1, "b") == Pair(second="b", first=1)
    assert (pair.first, pair.second, pair.joined()) == (1, "b", "1b")
    assert hash(pair) == hash((1, "b"))
    assert repr(pair) == "Pair(first=1, second='b')"
    assert pair._asdict() == {"first": 1, "second": "b"}
    assert (Pair._fields, Pair._field_defaults) == (Standard._fields, Standard._field_defaults)
    assert Pair.__match_args__ == Standard.__match_args__
    assert pair._replace(first=3) == Pair(3)
    assert Pair._make([4, "d"]) == Pair(4, "d")
    assert str(inspect.signature(Pair)) == "(first: 'int', second: 'str' = 'b')"
    assert get_type_hints(Pair) == {"first": int, "second": str}
    for copied in (pickle.loads(pickle.dumps(pair)), copy.deepcopy(pair)):
        assert type(copied) is Pair
        assert copied == pair
    assert Box[int](5).content == 5
    assert not hasattr(pair, "__dict__")


def test_a_tuple_refuses_wrong_arguments() -> None:
    with pytest.raises(TypeError, match=r"Pair\.__new__\(\) missing 1 required positional argument: 'first'"):
        Pair()
    with pytest.raises(TypeError, match="unexpected keyword argument 'third'"):
        Pair(1, third=3)
    with pytest.raises(TypeError, match="Expected 2 arguments, got 1"):
        Pair._make([1])
    with pytest.raises(ValueError, match="Got unexpected field names: \\['third'\\]"):
        Pair(1)._replace(third=3)
    with pytest.raises(AttributeError):
        Pair(1).first = 2
    with pytest.raises(TypeError, match="an argument without a default follows one with a default"):
        type(_TUPLE)("Wrong", (_TUPLE,), {"__qualname__": "Wrong", "__annotations__": {"a": "", "b": ""}, "a": 1})


def make(decorator: Callable[..., Any], **options: Any) -> Any:
    """Define a class with all kinds of fields."""

    @decorator(**options)
    class Fields:
        """Fields."""

        first: int
        self_: str = "x"
        name: list[int] = field(default_factory=lambda: [1])
        hidden: int = field(default=3, repr=False, compare=False)
        later: int = field(default=4, kw_only=True)
        inner: dict[str, int] = field(default_factory=dict, init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "hidden", self.hidden + 1)

    return Fields


FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"frozen": True},
    {"frozen": True, "slots": True},
    {"slots": True, "eq": False},
    {"kw_only": True, "repr": False},
    {"frozen": True, "slots": True, "order": True},
)


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_a_dataclass_behaves_like_that_of_the_standard_library(options: dict[str, Any]) -> None:
    ours, theirs = make(_OURS, **options), make(dataclasses.dataclass, **options)
    described = [
        (
            [(part.name, part.type, part.kw_only, part.repr, part.compare) for part in dataclasses.fields(kind)],
            str(inspect.signature(kind)).replace("'None'", "None"),
            hasattr(kind(first=1), "__dict__"),
            kind(first=1) == kind(first=1),
            kind(first=1) == kind(first=2),
            kind(first=1, hidden=8) == kind(first=1),
            kind.__hash__ is None,
            kind.__match_args__,
            kind(first=1, name=[5], later=9).name,
            kind(first=1).hidden,
            kind(first=1).inner,
            dataclasses.asdict(kind(first=1)),
            dataclasses.replace(kind(first=1), first=7).first,
            vars(kind)["__dataclass_params__"].frozen,
        )
        for kind in (ours, theirs)
    ]
    assert described[0] == described[1]
    if options.get("repr", True):
        assert repr(ours(first=1)) == repr(theirs(first=1))
    assert ours(first=1).name is not ours(first=1).name
    copied = copy.copy(ours(first=1, later=2))
    assert (copied.first, copied.later) == (1, 2)
    for kind in (ours, theirs):
        value = kind(first=1)
        if options.get("frozen"):
            with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'first'"):
                value.first = 2
            with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'first'"):
                del value.first
        else:
            value.first = 2
            assert value.first == 2
        with pytest.raises(TypeError, match="missing 1 required"):
            kind()


def test_a_dataclass_keeps_its_own_methods() -> None:
    @_OURS(frozen=True, slots=True)
    class Own:
        """Own methods."""

        value: int

        def __init__(self) -> None:
            object.__setattr__(self, "value", 5)

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 9

        def __repr__(self) -> str:
            return "own"

    assert (Own().value, repr(Own()), hash(Own()), Own() == 3) == (5, "own", 9, True)


@pytest.mark.parametrize("decorator", [_OURS, dataclasses.dataclass])
def test_a_frozen_dataclass_has_frozen_subclasses(decorator: Any) -> None:
    @_OURS(frozen=True, kw_only=True)
    class Parent:
        """A parent."""

        first: int
        second: int = 2

    @decorator(frozen=True, kw_only=True)
    class Child(Parent):
        """A child with one more field."""

        third: int

    make_child: Any = Child
    child = make_child(first=1, third=3)
    assert dataclasses.asdict(child) == {"first": 1, "second": 2, "third": 3}
    assert child == dataclasses.replace(child)
    for name in ("first", "third"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(child, name, 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        type(child).__mro__[1](first=1).first = 3
    with pytest.raises(TypeError, match="cannot inherit non-frozen dataclass from a frozen one"):
        dataclasses.dataclass(type("Thawed", (Parent,), {}))


def test_a_recursive_dataclass_has_a_short_representation() -> None:
    @_OURS
    class Node:
        """A node."""

        children: list[Any]

    make_node: Any = Node
    node = make_node([])
    node.children.append(node)
    assert repr(node).endswith("Node(children=[...])")


def test_a_second_class_of_a_form_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    make(_OURS, frozen=True, slots=True)
    compiled: list[object] = []
    run = builtins.exec

    def counting(*arguments: Any) -> None:
        compiled.append(arguments[0])
        run(*arguments)

    monkeypatch.setattr(builtins, "exec", counting)
    make(_OURS, frozen=True, slots=True)
    type(_TUPLE)("Another", (_TUPLE,), {"__qualname__": "Another", "__annotations__": {"a": "int", "b": "int"}})
    assert not compiled
    make(dataclasses.dataclass, frozen=True, slots=True)
    assert len(compiled) > 4
