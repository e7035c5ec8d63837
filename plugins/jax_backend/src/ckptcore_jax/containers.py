"""Containers registered with `jax.tree_util`, such as Flax structs, NNX State, Optax states and Equinox modules."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, Final

import jax
from jax import tree_util

from ckptcore.errors import UnsupportedKeyError
from ckptcore.model import AbstractArray, Attribute, Key
from ckptcore.protocols import ContainerHandler, Flattened, Priority
from ckptcore_jax.static_content import (
    MIXED_HANDLER,
    PYTHON_TYPES,
    MixedContainer,
    is_plain_named_tuple,
    merged_with_static,
    unwrapped,
    without_static,
)


class RegisteredContainer(ContainerHandler):
    """Handler of registered containers: flattens them as JAX does.

    Only the children that JAX sees are saved. Static content among them is not saved: functions,
    classes and shardings, also inside lists, tuples and dicts. An example is the activation
    function of an Equinox module. A load takes static content and the rest of the container from
    the abstract tree.

    A child can be replaced in place if the type was registered with attribute names or keys, and if
    the container has the child under that name or key. Other containers, such as frozen
    dataclasses, are rebuilt.
    """

    priority = Priority.REGISTERED

    def flatten(self, value: Any) -> Flattened:
        """Flatten one level.

        Raises:
            UnsupportedKeyError: if two children have the same key. The core refuses keys of
                unsupported types.
        """
        children = _children(value)
        keys = tuple([_key_of(entry) for entry, _ in children])
        if len(set(keys)) != len(keys):
            raise UnsupportedKeyError(
                f"{_name_of(value)} has two children with the same key, among {keys}: the flatten "
                "function that is registered with jax.tree_util must return unique keys. Nothing was written"
            )
        return Flattened("object", keys, [child for _, child in children], _name_of(value))

    def unflatten(self, like: Any, children: Sequence[object]) -> object:
        """Build a container with the static content of `like`."""
        keyed, structure = _flatten_one_level(like)
        return tree_util.tree_unflatten(structure, merged_with_static([child for _, child in keyed], children))

    def is_object(self, value: Any) -> bool:
        """Return False, because JAX programs treat registered containers as values and create new ones."""
        return False

    def replaceable(self, target: Any) -> Collection[int]:
        """Return the positions of children that are settable attributes, or items of a mutable mapping or sequence."""
        setter: object = type(target).__setattr__
        attributes = vars(target) if setter is object.__setattr__ and hasattr(target, "__dict__") else {}
        positions = set()
        for position, (entry, child) in enumerate(_children(target)):
            key, (child,) = _key_of(entry), unwrapped([child])
            if isinstance(key, Attribute):
                held = attributes.get(key.name, _MISSING)
            elif isinstance(target, MutableMapping):
                held = target.get(key, _MISSING)
            elif isinstance(target, MutableSequence) and type(key) is int and key < len(target):
                held = target[key]
            else:
                continue
            if held is child:
                positions.add(position)
        return positions

    def replace(self, target: Any, children: Mapping[int, object]) -> None:
        """Set attributes and items."""
        current = _children(target)
        for position, child in zip(children, unwrapped(children.values()), strict=True):
            key = _key_of(current[position][0])
            if isinstance(key, Attribute):
                setattr(target, key.name, child)
            else:
                target[key] = child


class _RegisteredSubclass(RegisteredContainer):
    """Handler of registered subclasses of dict, list and tuple. Their children can differ from their items."""

    priority = Priority.EXACT + 1


class _EquinoxModule(RegisteredContainer):
    """Handler of Equinox modules. Their children can be any objects."""

    @property
    def remedy(self) -> str:
        """Advice to save only arrays."""
        return "save eqx.filter(model, eqx.is_array), and give the result of a load the rest with eqx.combine"


class JoinPointHandler(ContainerHandler):
    """Handler of the leaves that `jax.example_libraries.optimizers.unpack_optimizer_state` returns.

    Each contains a pytree.
    """

    priority = Priority.FRAMEWORK

    def flatten(self, value: Any) -> Flattened:
        """Return the inner pytree."""
        return Flattened("object", (Attribute("subtree"),), [value.subtree], _name_of(value))

    def unflatten(self, like: Any, children: Sequence[object]) -> object:
        """Build a leaf with another pytree."""
        return type(like)(*children)

    def replaceable(self, target: Any) -> Collection[int]:
        """Return the position of the pytree."""
        return (0,)

    def replace(self, target: Any, children: Mapping[int, object]) -> None:
        """Set the pytree."""
        target.subtree = children[0]


class _FlaxGraph(ContainerHandler):
    """Handler of Flax NNX modules, optimizers and random streams, which programs change in place.

    Their parts can refer to each other and to their owner, and can share variables. Therefore they
    are flattened with ``nnx.state``: a shared variable is stored under its first path only. A
    module and its state have the same stored form, so one can be loaded into the other.
    """

    priority = Priority.REGISTERED

    def flatten(self, value: Any) -> Flattened:
        """Return the states of the object's attributes. Attributes without a state, such as None, are not saved."""
        state = _nnx().state(value)
        return Flattened("object", tuple(state), list(state.values()), _name_of(value))

    def unflatten(self, like: Any, children: Sequence[object]) -> object:
        """Build an object with the same shared variables and references between parts as `like`."""
        graph, state = _nnx().split(like)
        return _nnx().merge(graph, type(state)(dict(zip(state, children, strict=True))))

    def keeps_identity(self, value: Any) -> bool:
        """Return True, because programs keep references to such objects."""
        return True

    def is_object(self, value: Any) -> bool:
        """Return True if any leaf of the object is not an abstract array.

        A result of ``nnx.eval_shape`` is not an object.
        """
        leaves = tree_util.tree_leaves(_nnx().state(value))
        return any(not isinstance(leaf, jax.ShapeDtypeStruct | AbstractArray) for leaf in leaves)

    def replaceable(self, target: Any) -> Collection[int]:
        """Return the positions of all attributes."""
        return range(len(_nnx().state(target)))

    def replace(self, target: Any, children: Mapping[int, object]) -> None:
        """Update the variables in place. They stay the same objects."""
        state = _nnx().state(target)
        keys = tuple(state)
        _nnx().update(target, type(state)({keys[position]: child for position, child in children.items()}))


class _FlaxVariable(RegisteredContainer):
    """Handler of Flax NNX variables."""

    def keeps_identity(self, value: Any) -> bool:
        """Return True, because several modules may share a variable."""
        return True

    def replaceable(self, target: Any) -> Collection[int]:
        """Return the position of its value."""
        return range(len(_children(target)))

    def replace(self, target: Any, children: Mapping[int, object]) -> None:
        """Set the value without calling the hooks for assignments, as ``nnx.update`` does."""
        for child in children.values():
            target.set_raw_value(child)


_MISSING: Final = object()
_HANDLER: Final = RegisteredContainer()
_SUBCLASS_HANDLER: Final = _RegisteredSubclass()
_EQUINOX_HANDLER: Final = _EquinoxModule()
_JOIN_POINT_HANDLER: Final = JoinPointHandler()
_FLAX_GRAPH_HANDLER: Final = _FlaxGraph()
_FLAX_VARIABLE_HANDLER: Final = _FlaxVariable()


def container_handler(value_type: type, example: object) -> ContainerHandler | None:
    """Return the handler of containers of a type.

    Return None if the type is a leaf for JAX, or if the core handles it.
    """
    optimizers = sys.modules.get("jax.example_libraries.optimizers")  # values of its types exist only then
    if optimizers is not None and value_type is optimizers.JoinPoint:
        return _JOIN_POINT_HANDLER
    if value_type is MixedContainer:
        return MIXED_HANDLER
    if value_type in PYTHON_TYPES or tree_util.all_leaves([example]) or is_plain_named_tuple(example):
        return None
    equinox = sys.modules.get("equinox")
    if equinox is not None and issubclass(value_type, equinox.Module):
        return _EQUINOX_HANDLER
    nnx = sys.modules.get("flax.nnx")  # values of its types exist only if it was imported
    if nnx is not None and issubclass(value_type, nnx.Variable):
        return _FLAX_VARIABLE_HANDLER
    if nnx is not None and issubclass(value_type, getattr(nnx, "Pytree", ())):  # versions before 0.12 lack it
        return _FLAX_GRAPH_HANDLER
    return _SUBCLASS_HANDLER if issubclass(value_type, dict | list | tuple) else _HANDLER


def _nnx() -> Any:
    return sys.modules["flax.nnx"]  # values of its types exist only if it was imported


def _children(value: object) -> list[tuple[Any, Any]]:
    """Return the children that are not static, each with its JAX key."""
    keyed, _ = _flatten_one_level(value)
    return without_static([(path[0], child) for path, child in keyed])


def _flatten_one_level(value: object) -> tuple[list[tuple[tuple[Any, ...], Any]], Any]:
    # Older versions of JAX lack a public function for one level with keys. This call treats the
    # children as leaves, including None, and returns the structure.
    return tree_util.tree_flatten_with_path(value, is_leaf=lambda node: node is not value)


def _key_of(entry: Any) -> Key:
    if isinstance(entry, tree_util.GetAttrKey):
        return Attribute(entry.name)
    if isinstance(entry, tree_util.SequenceKey):
        return int(entry.idx)
    key: Key = entry.key if isinstance(entry, tree_util.DictKey | tree_util.FlattenedIndexKey) else entry
    return key


def _name_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
