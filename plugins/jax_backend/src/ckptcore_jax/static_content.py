"""Static content of registered containers, such as functions and shardings, also inside lists, tuples and dicts."""

from __future__ import annotations

import copy
import functools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import jax
import numpy as np
from jax import tree_util

from ckptcore.errors import UnsupportedLeafError
from ckptcore.model import Attribute, Key
from ckptcore.model.tree import MAX_DEPTH
from ckptcore.protocols import ContainerHandler, Flattened, Priority

_FUNCTION_TYPES: Final = frozenset(
    {
        types.BuiltinFunctionType,
        types.FunctionType,
        types.MethodType,
        functools.partial,
        np.ufunc,
        type(jax.jit(lambda: None)),
        jax.custom_jvp,
        jax.custom_vjp,
    }
    | ({jax.numpy.ufunc} if hasattr(jax.numpy, "ufunc") else set())
)
"""Types of functions.

Subclasses do not count, because a callable module is a container, and a callable array is a leaf.
"""

_STATIC_TYPES: Final = (
    type,  # classes, also dtypes such as jax.numpy.float32
    jax.Device,
    tree_util.PyTreeDef,
    *(sharding_type for name in ("Sharding", "PartitionSpec", "Mesh", "AbstractMesh")
      if isinstance(sharding_type := getattr(jax.sharding, name, None), type)),
)  # fmt: skip
"""Other types of static content. Their objects describe a program or its devices, and are leaves for JAX."""

PYTHON_TYPES: Final = frozenset({dict, OrderedDict, defaultdict, list, tuple, type(None)})
"""Types that `jax.tree_util` and ckptcore flatten without registration, like most named tuples."""

_SEQUENCES: Final[Mapping[type, Literal["list", "tuple"]]] = {list: "list", tuple: "tuple"}

_Share: TypeAlias = Literal["none", "some", "all"]


def _share_of_static(value: object, depth: int = 0) -> _Share:
    """Return whether none, some or all of a child is static.

    A container with only static content is static as a whole.
    """
    kind: type = type(value)
    if _is_data_type(kind):
        return "none"
    if _is_static(value):
        return "all"
    children = _children_of(value)
    kinds: set[type] = {*map(type, children)}
    if all(_is_data_type(kind) for kind in kinds):
        return "none"
    if depth == MAX_DEPTH:
        raise UnsupportedLeafError(f"it is deeper than {MAX_DEPTH} containers; a container may contain itself")
    shares = {_share_of_static(child, depth + 1) for child in children}
    return shares.pop() if len(shares) == 1 else "some"


@functools.lru_cache(maxsize=1024)
def _is_data_type(kind: type) -> bool:
    """Return True for types of arrays and plain values.

    Their objects are not inspected, because a state can have a million of them.
    """
    is_container = kind in PYTHON_TYPES - {type(None)} or issubclass(kind, tuple)
    is_callable = any("__call__" in vars(base) for base in kind.__mro__)
    return not (is_container or is_callable or issubclass(kind, _STATIC_TYPES) or _is_of_equinox(kind))


def _is_of_equinox(kind: type) -> bool:
    return kind.__module__.startswith("equinox.")


def _is_static(value: object) -> bool:
    if type(value) in _FUNCTION_TYPES or isinstance(value, _STATIC_TYPES):
        return True
    is_code = callable(value) and hasattr(value, "__qualname__")
    # Equinox has markers that are leaves, such as those in eqx.nn.Shared.
    return (is_code or _is_of_equinox(type(value))) and bool(tree_util.all_leaves([value]))


def is_plain_named_tuple(value: object) -> bool:
    """Return True for a named tuple whose children are its fields: its type has no registered flatten function."""
    if not isinstance(value, tuple) or not hasattr(value, "_fields"):
        return False
    _, static = tree_util.default_registry.flatten_one_level(value)
    return static is type(value)


def _children_of(value: Any) -> Collection[object]:
    """Return the children of a container that is not registered, and an empty collection for other values."""
    if type(value) not in PYTHON_TYPES and not is_plain_named_tuple(value):
        return ()
    return value.values() if isinstance(value, dict) else value


class MixedContainer:
    """A list, tuple or dict inside a registered container, with some static content.

    Attributes:
        content: the container itself.
    """

    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        """Refer to a container."""
        self.content = content


def without_static(children: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return the children with content to save, each with its key.

    Partly static children become `MixedContainer` objects.
    """
    shares = [(key, child, _share_of_static(child)) for key, child in children]
    return [(key, _wrapped(child, share)) for key, child, share in shares if share != "all"]


def _wrapped(child: object, share: _Share) -> object:
    """Return a child, inside a `MixedContainer` if it has static content."""
    return child if share == "none" else MixedContainer(child)


class _MixedHandler(ContainerHandler):
    """Handler of `MixedContainer`. Static content is not saved. A load takes it from the caller's container.

    In a list or tuple, None is saved in place of a static item, as ``eqx.filter`` does, so that
    other items keep their indices.
    """

    priority = Priority.EXACT

    def flatten(self, value: MixedContainer) -> Flattened:
        """Return the content that is not static, under its own keys."""
        content = value.content
        kind = _SEQUENCES.get(type(content))
        if kind is not None:
            children = [None if _is_static(child) else _wrapped(child, _share_of_static(child)) for child in content]
            return Flattened(kind, range(len(children)), children)
        kept = without_static(_items(content))
        keys, children = tuple([key for key, _ in kept]), [child for _, child in kept]
        if type(content) is dict:
            return Flattened("dict", keys, children)
        if type(content) is OrderedDict:
            return Flattened("OrderedDict", keys, children)
        name = f"{type(content).__module__}.{type(content).__qualname__}"
        return Flattened("dict" if isinstance(content, dict) else "object", keys, children, name)

    def unflatten(self, like: MixedContainer, children: Sequence[object]) -> object:
        """Return a container of the same type as the content, with the given children and the static content."""
        content: Any = like.content
        if type(content) in _SEQUENCES:
            pairs = zip(content, unwrapped(children), strict=True)
            return type(content)([own if _is_static(own) else new for own, new in pairs])
        merged = merged_with_static([child for _, child in _items(content)], children)
        if not isinstance(content, dict):
            return content._make(merged)
        made = copy.copy(content)
        made.update(zip(content, merged, strict=True))
        return made

    def replaceable(self, target: MixedContainer) -> Collection[int]:
        """Return the positions of all children of a list or dict."""
        content = target.content
        if isinstance(content, list):
            return range(len(content))
        return range(len(without_static(_items(content)))) if isinstance(content, dict) else ()

    def replace(self, target: MixedContainer, children: Mapping[int, object]) -> None:
        """Replace items of the list or dict, except static ones."""
        content = target.content
        keys = range(len(content)) if isinstance(content, list) else [key for key, _ in without_static(_items(content))]
        for position, child in zip(children, unwrapped(children.values()), strict=True):
            if not _is_static(content[keys[position]]):
                content[keys[position]] = child


def merged_with_static(like: Sequence[object], children: Sequence[object]) -> list[object]:
    """Return the children of `like`, but with `children` in place of all children that are not fully static."""
    given = iter(children)
    return unwrapped([child if _share_of_static(child) == "all" else next(given) for child in like])


def unwrapped(children: Iterable[object]) -> list[object]:
    """Replace every `MixedContainer` by the container in it."""
    return [child.content if isinstance(child, MixedContainer) else child for child in children]


def _items(content: Any) -> list[tuple[Key, Any]]:
    """Return the children of a dict or a named tuple, each with its key."""
    if isinstance(content, dict):
        return list(content.items())
    return [(Attribute(name), child) for name, child in zip(content._fields, content, strict=True)]


MIXED_HANDLER: Final = _MixedHandler()
