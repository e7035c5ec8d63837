"""Named tuples and dataclasses that are defined without compiling code.

A first save defines about 120 records. `dataclasses.dataclass` compiles up to seven functions for each, and
`typing.NamedTuple` an expression and each annotation: a third of the time of a first save. Here a method is compiled
once for each form, such as "three fields, frozen", and each class gets a copy with its own names. Classes behave like
those of the standard library, and type checkers see its decorator and its class.
"""

from __future__ import annotations

import dataclasses
from _collections import _tuplegetter  # type: ignore[import-not-found]  # the fields of `collections.namedtuple`
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from reprlib import recursive_repr
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Final, Self


@cache
def _compiled(statement: str, last: str, count: int) -> CodeType:
    """Compile a method with arguments ``_0``, ``_1`` and so on.

    Args:
        statement: runs for each argument, for which an asterisk stands.
        last: runs at the end; an asterisk stands for all arguments.
        count: the number of arguments.
    """
    names = [f"_{number}" for number in range(count)]
    listed = "".join([f"{name}, " for name in names])
    lines = [*[statement.replace("*", name) for name in names], last.replace("*", listed)]
    namespace: dict[str, Any] = {}
    exec(f"def method(self, /, {listed}):\n " + "\n ".join(lines), namespace)  # noqa: S102  # no input of a program
    code: CodeType = namespace["method"].__code__
    return code


def _method(
    qualified: str,
    statement: str,
    last: str,
    names: dict[str, Any],
    defaults: Mapping[str, Any],
    fields: Sequence[str],
    by_name: Sequence[str] = (),
) -> Any:
    """Return a method: a copy of what `_compiled` returns, with the names of fields.

    Args:
        qualified: the names of the class and of the method.
        statement, last: see `_compiled`.
        names: the names that the statements use.
        defaults: the default values of arguments.
        fields: the names of the arguments, and of the attributes that have the name of an argument.
        by_name: the same of arguments that must be passed by name.

    Raises:
        TypeError: an argument without a default follows one with a default.
    """
    code = _compiled(statement, last, len(fields) + len(by_name))
    renamed = {f"_{number}": field for number, field in enumerate([*fields, *by_name])}
    name = qualified.rpartition(".")[2]
    code = code.replace(
        co_varnames=tuple([renamed.get(value, value) for value in code.co_varnames]),
        co_names=tuple([renamed.get(value, value) for value in code.co_names]),
        co_consts=tuple([renamed.get(value, value) for value in code.co_consts]),
        co_argcount=1 + len(fields),
        co_kwonlyargcount=len(by_name),
        co_name=name,
        co_qualname=qualified,
    )
    values = [defaults[field] for field in fields if field in defaults]
    if any(field in defaults for field in fields[: len(fields) - len(values)]):
        raise TypeError(f"{qualified}: an argument without a default follows one with a default")
    method = FunctionType(code, names, name, tuple(values))
    method.__kwdefaults__ = {field: defaults[field] for field in by_name if field in defaults}
    return method


class _Tuple(tuple[Any, ...]):
    """The methods of named tuples."""

    __slots__ = ()
    if TYPE_CHECKING:  # `typing.get_type_hints` must not find them
        _fields: tuple[str, ...]

    @classmethod
    def _make(cls, values: Iterable[object]) -> Self:
        made = tuple.__new__(cls, values)
        if len(made) != len(cls._fields):
            raise TypeError(f"Expected {len(cls._fields)} arguments, got {len(made)}")
        return made

    def _replace(self, /, **changes: object) -> Self:
        made = self._make(map(changes.pop, self._fields, self))
        if changes:
            raise ValueError(f"Got unexpected field names: {list(changes)!r}")
        return made

    __replace__ = _replace

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))

    def __repr__(self) -> str:
        fields = [f"{name}={value!r}" for name, value in zip(self._fields, self, strict=True)]
        return f"{type(self).__name__}({', '.join(fields)})"

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)  # for copy and pickle


class _TupleType(type):
    """The type of `NamedTuple`, which replaces it by `_Tuple` in a class that inherits from it."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        fields = tuple(namespace.get("__annotations__", ()))
        defaults = {field: namespace.pop(field) for field in fields if field in namespace}
        qualified = f"{namespace['__qualname__']}.__new__"
        new = _method(qualified, "pass", "return new(self, (*))", {"new": tuple.__new__}, defaults, fields)
        new.__annotations__ = namespace.get("__annotations__", {})
        namespace |= {field: _tuplegetter(number, None) for number, field in enumerate(fields)}
        namespace |= {"_fields": fields, "_field_defaults": defaults, "__match_args__": fields}
        namespace |= {"__new__": new, "__slots__": ()}
        return type(name, (_Tuple, *bases[1:]), namespace)


class _Unset:
    """The default of an argument whose value a function makes."""

    def __repr__(self) -> str:
        return "<factory>"


_UNSET: Final = _Unset()


def _dataclass(cls: type | None = None, /, **options: Any) -> Any:
    """Define a class as `dataclasses.dataclass` does, which is called if there are rare options."""
    if cls is None:
        return lambda decorated: _dataclass(decorated, **options)
    is_plain = options.keys() <= {"eq", "frozen", "kw_only", "repr", "slots"}
    return _plain_dataclass(cls, **options) if is_plain else dataclasses.dataclass(cls, **options)


def _plain_dataclass(
    cls: type,
    *,
    eq: bool = True,
    frozen: bool = False,
    kw_only: bool = False,
    repr: bool = True,  # the name that `dataclasses.dataclass` has
    slots: bool = False,
) -> Any:
    own = {name for name, value in vars(cls).items() if name != "__hash__" or value is not None}
    parents = [vars(parent)[_PARAMETERS] for parent in cls.__mro__ if _PARAMETERS in vars(parent)]
    for parameters in parents:
        parameters.frozen = False  # `dataclasses` makes a class that is not frozen, whose parents must not be, either
    try:
        made: Any = dataclasses.dataclass(cls, init=False, repr=False, eq=False, kw_only=kw_only, slots=slots)
    finally:
        for parameters in parents:
            parameters.frozen = frozen
    vars(made)[_PARAMETERS].frozen = frozen
    fields = dataclasses.fields(made)
    methods: dict[str, Any] = {"__init__": _init_method(made, fields, frozen=frozen)}
    if repr:
        methods["__repr__"] = _repr_method([field.name for field in fields if field.repr])
    if eq:
        methods |= _comparisons([field.name for field in fields if field.compare], frozen=frozen)
    if frozen:
        methods |= _refusals(made, [field.name for field in fields])
    if frozen and slots:
        methods |= {"__getstate__": _getstate, "__setstate__": _setstate}
    for name, method in methods.items():
        if name not in own:
            setattr(made, name, method)
    return made


_PARAMETERS: Final = "__dataclass_params__"


def _init_method(made: Any, fields: Sequence[dataclasses.Field[Any]], *, frozen: bool) -> Any:
    """Return the method that sets the fields. Positional arguments precede those that must be passed by name."""
    arguments = [field for field in fields if field.init]
    defaults = {}
    makers = []
    for field in fields:
        if field.default_factory is not dataclasses.MISSING:
            makers.append((field.name, field.default_factory))
            defaults[field.name] = _UNSET
        elif field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
    last = [_MAKE] * bool(makers) + ["self.__post_init__()"] * hasattr(made, "__post_init__") + ["pass"]
    init = _method(
        f"{made.__qualname__}.__init__",
        "set(self, '*', *)" if frozen else "self.* = *",
        "\n ".join(last),
        {"set": object.__setattr__, "makers": makers, "unset": _UNSET, "__name__": made.__module__},
        defaults,
        [field.name for field in arguments if not field.kw_only],
        [field.name for field in arguments if field.kw_only],
    )
    init.__annotations__ = {**{field.name: field.type for field in arguments}, "return": None}
    return init


_MAKE: Final = """
 for _name, _make in makers:
  if getattr(self, _name, unset) is unset:
   set(self, _name, _make())
"""


def _repr_method(names: Collection[str]) -> Any:
    @recursive_repr()
    def __repr__(self: object) -> str:
        return f"{type(self).__qualname__}({', '.join([f'{name}={getattr(self, name)!r}' for name in names])})"

    return __repr__


def _comparisons(names: Sequence[str], *, frozen: bool) -> dict[str, Any]:
    """Return the methods that compare objects of one class by some fields."""
    # `attrgetter` returns a tuple if it has at least two names.
    compared = attrgetter(*(names if len(names) > 1 else [*names, "__class__", "__class__"]))

    def __eq__(self: object, other: object) -> bool:
        return compared(self) == compared(other) if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self: object) -> int:
        return hash(compared(self))

    return {"__eq__": __eq__, "__hash__": __hash__ if frozen else None}


def _refusals(made: Any, names: Collection[str]) -> dict[str, Any]:
    """Return the methods of a frozen class that refuse to set and to delete fields."""

    def __setattr__(self: object, name: str, value: object) -> None:
        if type(self) is made or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(made, self).__setattr__(name, value)

    def __delattr__(self: object, name: str) -> None:
        if type(self) is made or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(made, self).__delattr__(name)

    return {"__setattr__": __setattr__, "__delattr__": __delattr__}


def _getstate(self: Any) -> list[Any]:
    """Return the fields of a frozen class with slots, for copy and pickle."""
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _setstate(self: Any, state: Iterable[object]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=False):
        object.__setattr__(self, field.name, value)


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: PLC0414  # exports it
    from typing import NamedTuple as NamedTuple  # noqa: PLC0414  # exports it
else:
    dataclass = _dataclass
    NamedTuple = type.__new__(_TupleType, "NamedTuple", (), {})
