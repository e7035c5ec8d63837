"""Converts values of torch pickles to trees of tensors and values."""

from __future__ import annotations

import base64
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, cast

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import (
    JSON,
    LEAF,
    UNREADABLE,
    ArrayRecord,
    Attribute,
    Key,
    LeafRecord,
    Node,
    PlainKey,
    Skeleton,
    TreePath,
    ValueRecord,
    column_record,
    float_to_json,
    format_path,
    is_column,
)
from ckptcore.model.tree import MAX_KEY_DEPTH, NodeKind
from ckptcore_dcp.numpy_arrays import MaskedArray, NumpyReader, NumpyValue, Objects
from ckptcore_dcp.pickles import Call, Global, OutOfLine, Persistent, Places, Value, brief, builtin_value
from ckptcore_dcp.pickles.values import MAX_KEY_PARTS, KeyCheck
from ckptcore_dcp.stored_tensors import FRAMEWORK, FindStorage, StoredTensor, stored_tensor
from ckptcore_dcp.tensor_parts import TensorPart, tensor_part


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A leaf that cannot be read. A load that requests it raises `UnsupportedLeafError`.

    Attributes:
        reason: what is stored, and what to save instead.
    """

    reason: str

    @classmethod
    def of(cls, error: UnsupportedLeafError, path: str) -> Unreadable:
        """Return the leaf for an error that begins with its path."""
        return cls(str(error).removeprefix(f"{path} is "))


@dataclass(frozen=True, slots=True)
class Column:
    """A long list, tuple or dict of plain values: one leaf, as the core saves it.

    Attributes:
        values: the container.
    """

    values: list[Any] | tuple[Any, ...] | dict[Any, Any]


Leaf: TypeAlias = StoredTensor | TensorPart | Column | Unreadable | None | bool | int | float | complex | str | bytes
"""A leaf of a tree: a tensor, or a value stored in the pickle itself."""

_ATTRIBUTE_DEPTH: Final = 3
"""Depth of ``{"_metadata": {module: {"version": number}}}``."""

_PLAIN: Final = frozenset([type(None), bool, int, float, complex, str, bytes])
_TEXTS: Final = frozenset([str, bytes])
_MAX_CONTENT_BYTES: Final = 1 << 26
"""Maximum length, in bytes, of an `OutOfLine` text or bytes object that is read into a leaf."""
_WITHOUT_TEXT: Final = _PLAIN - _TEXTS
_STRINGS: Final = frozenset([str])
_EXACT: Final = 1 << 53
"""Numbers of smaller magnitude are stored as JSON numbers without further encoding."""
_SHORT: Final = 64
"""Texts up to this length do not count toward the limit on texts. Longer texts are not compared with each other."""
_MAX_TEXT_GROWTH: Final = 16
"""Maximum bytes of text in a tree per byte of the pickle. A pickle can refer to one text from many places."""
_ALWAYS_ALLOWED_TEXT: Final = 1 << 26
_MIN_COLUMN: Final = 1000
"""Minimum number of values of a column. Containers are not allowed as values, because a pickle can refer to one list
from many places."""
_MAX_DEPTH: Final = 150
"""Maximum nesting depth, in containers. The core's limit is 200, and an object adds two or three levels."""
_ORDERED: Final = Global("collections", "OrderedDict")
_MAPS: Final = frozenset(
    [
        _ORDERED,
        Global("collections", "defaultdict"),
        Global("collections", "Counter"),
        Global("flax.core.frozen_dict", "FrozenDict"),
        Global("haiku._src.data_structures", "FlatMap"),
        Global("haiku._src.data_structures", "FlatMapping"),
    ]
)
"""Classes that are called with a mapping or with pairs."""
_JAX_ARRAYS: Final = frozenset(["_reconstruct_array", "reconstruct_device_array", "reconstruct_array"])
_BUILTINS: Final = ("builtins", "__builtin__")
_BYTES_IO: Final = Global("_io", "BytesIO")
_MAKERS: Final = frozenset([Global("copyreg", "_reconstructor"), Global("copy_reg", "_reconstructor")])


def tree_of(
    value: Value,
    *,
    key: str,
    limit: int = 1 << 20,
    places: Places | None = None,
    embedded: FindStorage | None = None,
) -> tuple[Skeleton, Sequence[Leaf]]:
    """Return the skeleton and the leaves of a value of `read_pickle`.

    An object of an unknown class becomes an ``object`` node with the class name. Its children are
    its attributes and, if present, ``__arguments__``, ``__keywords__``, ``__state__``,
    ``__items__`` and ``__pairs__``. A function or class becomes its name as text.

    Args:
        value: the unpickled value.
        key: the object that contains the pickle, for errors.
        limit: maximum number of containers and leaves. A pickle of a few bytes can refer to one
            container any number of times; a pickle without such references has at least one byte for each container and
            leaf.
        places: byte ranges of texts and bytes in the pickle. Without them, NumPy scalars become numbers, and
            NumPy arrays become objects of an unknown class.
        embedded: finds storages of PyTorch in the pickle itself.

    Raises:
        CorruptCheckpointError: the value is too deep or too large, or has an invalid tensor.
    """
    walk = _TreeBuilder(key, limit, NumpyReader(key, places), embedded)
    skeleton = walk.visit(value, (), 0)
    return skeleton, walk.leaves


def leaf_record(leaf: Leaf) -> LeafRecord:
    """Return the tree's record of a leaf. Values are encoded as by the core's own handlers."""
    if (type(leaf) is int or type(leaf) is float) and -_EXACT < leaf < _EXACT:  # fast path for most leaves
        return ValueRecord(type(leaf).__name__, leaf)
    if isinstance(leaf, Unreadable | TensorPart):
        return ValueRecord(UNREADABLE, leaf.reason)
    if isinstance(leaf, StoredTensor):
        framework = leaf.framework
        notes = FRAMEWORK if framework == "torch" else {} if framework is None else {"framework": framework}
        return ArrayRecord(leaf.spec, leaf.kind, notes=notes)
    if isinstance(leaf, Column):
        return column_record(leaf.values)
    return ValueRecord("none" if leaf is None else type(leaf).__name__, _encode_leaf(leaf))


class _TreeBuilder:
    """One pass over a value.

    Attributes:
        leaves: the leaves found, in order.
    """

    def __init__(self, key: str, limit: int, numpy: NumpyReader, embedded: FindStorage | None) -> None:
        self._key = key
        self._embedded = embedded
        self._numpy = numpy
        self._remaining = limit
        self._text_bytes = _MAX_TEXT_GROWTH * limit + _ALWAYS_ALLOWED_TEXT
        self._containers: set[int] = set()  # id() of each container around the current value
        self._nodes: dict[Node, Node] = {}
        self.leaves: list[Leaf] = []

    def visit(self, value: Value, path: TreePath, depth: int) -> Skeleton:
        """Return the skeleton of a value at a path, inside `depth` containers."""
        self._remaining -= 1
        if self._remaining < 0 or depth > _MAX_DEPTH:
            raise self._too_large(path)
        if type(value) in _PLAIN:
            self._count_text(value, path)
            self.leaves.append(cast(Leaf, value))
            return LEAF
        if isinstance(value, list | tuple | dict) and len(value) >= _MIN_COLUMN and _is_flat(value):
            self._remaining -= len(value)
            if self._remaining < 0:
                raise self._too_large(path)
            if is_column(value):
                return self._leaf(Column(value))
        if id(value) in self._containers:
            return self._leaf(Unreadable("a container that contains itself: save a tree without cycles"))
        self._containers.add(id(value))
        try:
            if isinstance(value, dict):
                if _STRINGS.issuperset(map(type, value)):
                    names = cast(tuple[str, ...], tuple(value))
                    return self._shared(Node("dict", names, self._children(names, value.values(), path, depth)))
                return self._mapping("dict", value.items(), None, path, depth)
            if isinstance(value, list | tuple):
                kind: NodeKind = "list" if isinstance(value, list) else "tuple"
                keys = tuple(range(len(value)))
                return self._shared(Node(kind, keys, self._children(keys, value, path, depth)))
            if isinstance(value, set | frozenset):
                return self._sequence(sorted(value, key=_sort_key), f"builtins.{type(value).__name__}", path, depth)
            if isinstance(value, Global):
                return self._leaf(_qualified_name(value))
            if isinstance(value, OutOfLine):
                return self._leaf(self._content(value, path))
            return self._result(cast("Call | Persistent", value), path, depth)
        finally:
            self._containers.discard(id(value))

    def _shared(self, node: Node) -> Node:
        """Return one shared node for all equal containers that contain only leaves.

        A tree may have millions of such containers, and the garbage collector visits each node. Keys must be texts or
        indices, because keys of different types can be equal, such as 1 and True.
        """
        return self._nodes.setdefault(node, node) if node.children.count(LEAF) == len(node.children) else node

    def _children(
        self, keys: Iterable[Key], values: Collection[Value], path: TreePath, depth: int
    ) -> tuple[Skeleton, ...]:
        """Return the skeletons of the values of a container at `path`."""
        leaves, plain = self.leaves, _PLAIN
        if _WITHOUT_TEXT.issuperset(map(type, values)):  # fast path without a loop, for millions of values
            self._remaining -= len(values)
            if self._remaining < 0:
                raise self._too_large(path)
            leaves.extend(cast(Collection[Leaf], values))
            return (LEAF,) * len(values)
        children: list[Skeleton] = []
        for key, value in zip(keys, values, strict=True):
            if type(value) in plain:  # fast path without a call of `visit`, for millions of values
                self._remaining -= 1
                if type(value) in _TEXTS:
                    self._count_text(value, path)
                leaves.append(cast(Leaf, value))
                children.append(LEAF)
            else:
                children.append(self.visit(value, (*path, key), depth + 1))
        if self._remaining < 0:
            raise self._too_large(path)
        return tuple(children)

    def _content(self, value: OutOfLine, path: TreePath) -> Leaf:
        """Return a long text, or long bytes that are not an array.

        Each occurrence counts toward the limit on texts, because a pickle can refer to one text from many places.
        """
        length = value.stop - value.start
        if length > _MAX_CONTENT_BYTES:
            return Unreadable(f"a {brief(value)}, where at most {_MAX_CONTENT_BYTES} are read: save it as an array")
        self._text_bytes -= length
        if self._text_bytes < 0:
            raise self._too_large(path)
        return value.read()

    def _count_text(self, value: Value, path: TreePath) -> None:
        if isinstance(value, str | bytes) and len(value) > _SHORT:
            self._text_bytes -= len(value)
            if self._text_bytes < 0:
                raise self._too_large(path)

    def _too_large(self, path: TreePath) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"the pickle in {self._key!r} cannot be read: at {format_path(path)[:200]} it is deeper than "
            f"{_MAX_DEPTH} containers, or has far more leaves than bytes; it is not a checkpoint",
            key=self._key,
        )

    def _leaf(self, leaf: Leaf) -> Skeleton:
        self.leaves.append(leaf)
        return LEAF

    def _result(self, value: Call | Persistent, path: TreePath, depth: int) -> Skeleton:
        """Return the skeleton of the result of a call, or of the object with a persistent id."""
        if _may_describe_tensor(value):
            try:
                tensor = tensor_part(value, key=self._key, path=format_path(path))
                if tensor is None:
                    tensor = stored_tensor(value, key=self._key, path=format_path(path), embedded=self._embedded)
            except UnsupportedLeafError as error:
                return self._leaf(Unreadable.of(error, format_path(path)))
            if tensor is not None:
                return self._leaf(tensor)
        if isinstance(value, Persistent):
            parts = value.id
            # Before torch 1.6 the class of a module was stored with its source: ("module", class,
            # file, source).
            if isinstance(parts, tuple) and len(parts) > 1 and parts[0] == "module":
                return self.visit(parts[1], path, depth + 1)
            raise CorruptCheckpointError(
                f"{format_path(path)} in {self._key!r} refers to an unknown object outside the pickle",
                key=self._key,
            )
        function = value.function
        if isinstance(function, Global):
            if function in _MAPS and not value.appended:
                pairs = _pairs(value)
                if pairs is not None:
                    kind: NodeKind = "OrderedDict" if function == _ORDERED else "dict"
                    name = None if function == _ORDERED else _qualified_name(function)
                    attributes = self._attributes_of(value.state) if function == _ORDERED else None
                    return self._mapping(kind, pairs, name, path, depth)._replace(attributes=attributes)
            if function.module in _BUILTINS and function.name in ("set", "frozenset") and len(value.arguments) == 1:
                elements = value.arguments[0]
                if isinstance(elements, list | tuple):
                    return self._sequence(elements, f"builtins.{function.name}", path, depth)
            array: NumpyValue | None = None
            if function.module.startswith("numpy."):
                array = self._numpy.read(value, format_path(path))
            elif function.name in _JAX_ARRAYS and function.module.startswith(("jax.", "jaxlib.")):
                array = self._numpy.of_jax(value, format_path(path))
            if array is not None:
                return self._numpy_array(array, f"pickle:{id(value)}", path, depth)
            plain = _plain_value(function, value)
            if plain is not value:
                return self.visit(plain, path, depth + 1)
        return self._object(value, path, depth)

    def _numpy_array(self, array: NumpyValue, storage: str, path: TreePath, depth: int) -> Skeleton:
        """Return the skeleton of an array, of the fields of a structure, or of objects.

        `storage` identifies the array. The position of its bytes cannot, because different arrays of one byte can share
        one literal.
        """
        self._remaining -= 1
        if self._remaining < 0:
            raise self._too_large(path)
        if isinstance(array, StoredTensor):
            return self._leaf(replace(array, storage=f"{storage}{array.storage}"))
        if isinstance(array, str):
            return self._leaf(Unreadable(array))
        if isinstance(array, Objects):
            return self.visit(array.elements, path, depth + 1)
        if isinstance(array, MaskedArray):
            data, mask = [self._numpy_array(part, storage + part.dtype, path, depth) for part in array[:2]]
            fill = self.visit(array.fill_value, (*path, "fill_value"), depth + 1)
            return Node("dict", ("data", "mask", "fill_value"), (data, mask, fill), "numpy.ma.MaskedArray")
        if not isinstance(array, Mapping):
            return self._leaf(array)
        fields = [
            self._numpy_array(part, f"{storage}.{name}", (*path, name), depth + 1) for name, part in array.items()
        ]
        return Node("dict", tuple(array), tuple(fields), "numpy.void")

    def _sequence(self, values: Collection[Value], type_name: str, path: TreePath, depth: int) -> Node:
        keys = tuple(range(len(values)))
        return Node("object", keys, self._children(keys, values, path, depth), type_name)

    def _mapping(
        self, kind: NodeKind, pairs: Iterable[tuple[Value, Value]], type_name: str | None, path: TreePath, depth: int
    ) -> Node:
        pairs = list(pairs)
        if not all(type(key) is str for key, _ in pairs):
            KeyCheck(self._key).check(pairs, [key for key, _ in pairs], 0)  # keys of calls were not checked before
        latest: dict[Value, Value] = dict(pairs)
        keys: list[Key] = [cast(PlainKey, key) for key in latest if type(key) is str or _is_tree_key(key)]
        if len(keys) != len(latest):
            # Tree paths cannot contain such keys, so the pairs are stored as a sequence.
            return self._sequence(latest.items(), type_name or f"builtins.{kind}", path, depth)
        children = self._children(keys, latest.values(), path, depth)
        return Node(kind, tuple(keys), children, type_name)

    def _attributes_of(self, state: Value) -> dict[str, JSON] | None:
        """Return the attributes of an OrderedDict that JSON represents: module versions, in its ``_metadata``."""
        attributes = {name: self._to_json(value, 0) for name, value in (_attributes(state) or {}).items()}
        return {name: value for name, value in attributes.items() if value is not None} or None

    def _to_json(self, value: Value, depth: int) -> JSON:
        """Return the JSON of a bool, int, text, or dict of such values. None for other values, or beyond the limits."""
        self._remaining -= 1
        if self._remaining < 0 or depth > _ATTRIBUTE_DEPTH:
            return None
        if isinstance(value, Call) and value.function == _ORDERED:
            value = dict(_pairs(value) or ())
        if isinstance(value, dict):
            return {key: self._to_json(child, depth + 1) for key, child in value.items() if isinstance(key, str)}
        return value if isinstance(value, bool | int | str) else None

    def _object(self, call: Call, path: TreePath, depth: int) -> Node:
        """Return a node for an object of an unknown class."""
        name, arguments = call.function, call.arguments
        pairs, items = list(call.pairs), list(call.appended)
        if isinstance(name, Global) and name in _MAKERS and len(arguments) == 3:  # the class, its builtin base, a value
            name, arguments = arguments[0], arguments[2:]
            (content,) = arguments
            if content is None:  # the base is object
                arguments = ()
            elif isinstance(content, dict):
                arguments, pairs = (), [*content.items(), *pairs]
            elif isinstance(content, list):
                arguments, items = (), [*content, *items]
        if isinstance(name, Persistent) and isinstance(name.id, tuple) and len(name.id) > 1 and name.id[0] == "module":
            name = name.id[1]
        type_name = _qualified_name(name) if isinstance(name, Global) else "object"
        attributes = _attributes(call.state)
        if not arguments and not call.keywords:
            # Subclasses of dict and list. Some also store their items as attributes.
            if pairs and not items and attributes is not None and _repeats(attributes, pairs):
                return self._mapping("dict", pairs, type_name, path, depth)
            if items and not pairs and attributes == {}:
                return self._sequence(items, type_name, path, depth)
        groups: dict[str, Value] = {
            "__arguments__": arguments,
            "__keywords__": {name: value for name, value in call.keywords.items()},  # noqa: C416  # a dict of values
            "__items__": items,
            "__pairs__": cast(Value, pairs),
        }
        parts: list[tuple[str, Value]] = [(label, part) for label, part in groups.items() if part]
        parts.extend([("__state__", call.state)] if attributes is None else attributes.items())
        keys = tuple([Attribute(label) for label, _ in parts])
        if len(set(keys)) != len(keys):
            raise CorruptCheckpointError(f"{format_path(path)} in {self._key!r} has an attribute twice", key=self._key)
        children = self._children(keys, [part for _, part in parts], path, depth)
        return Node("object", keys, children, type_name)


def _may_describe_tensor(value: Value) -> bool:
    if isinstance(value, Call):
        return isinstance(value.function, Global) and value.function.module.startswith("torch.")
    return isinstance(value, Persistent)


def _pairs(call: Call) -> Sequence[tuple[Value, Value]] | None:
    """Return the pairs of a mapping built by a call, or None if they are unknown."""
    pairs: list[tuple[Value, Value]] = []
    for argument in call.arguments:
        if isinstance(argument, dict):
            pairs.extend(argument.items())
        elif isinstance(argument, list | tuple):
            for pair in argument:
                if not isinstance(pair, list | tuple) or len(pair) != 2:
                    return None
                pairs.append((pair[0], pair[1]))
        elif argument is not None and not isinstance(argument, Global):  # a defaultdict names its default factory
            return None
    pairs.extend(call.pairs)
    return pairs if all(_is_key(pair[0]) for pair in pairs) else None


def _is_key(value: Value) -> bool:
    if type(value) is tuple:
        return _is_tree_key(value)
    return value is None or type(value) in (str, int, bool, float, complex, bytes) or isinstance(value, Global)


def _is_tree_key(value: Value) -> bool:
    """Return True for an int, a bool, text, and a tuple of such keys, within the limits of pickles and of trees."""
    level, count = [value], 0
    for _ in range(MAX_KEY_DEPTH + 1):
        count += len(level)
        inner = [part for part in level if type(part) is tuple]
        if count > MAX_KEY_PARTS or any(type(part) not in (str, int, bool, tuple) for part in level):
            return False
        if not inner:
            return True
        if sum(map(len, inner)) > MAX_KEY_PARTS:
            return False
        level = [part for parts in inner for part in parts]
    return False


def _plain_value(function: Global, call: Call) -> Value:
    """Return the plain value that a call builds, or the call itself if it builds none."""
    arguments = call.arguments
    if function == Global("torch", "device") and arguments and type(arguments[0]) is str:
        number = arguments[1] if len(arguments) > 1 else None
        return f"{arguments[0]}:{number}" if type(number) is int else arguments[0]
    if function == Global("torch", "Size") and len(arguments) == 1 and isinstance(arguments[0], tuple):
        return arguments[0]
    if function == _BYTES_IO and not arguments and isinstance(call.state, tuple) and call.state:
        return call.state[0]  # the bytes; position and attributes follow
    first = arguments[0] if arguments else None
    if isinstance(first, Call) and first.arguments and isinstance(first.arguments[0], Call):
        return call  # deep nesting of bytes calls: limit recursion that the file controls
    return builtin_value(call)


def _sort_key(value: Value) -> tuple[str, str]:
    """Sort key for items of a set, whose iteration order differs between processes."""
    plain = value is None or type(value) in (bool, int, float, complex, str, bytes)
    return type(value).__name__, repr(value) if plain else brief(value)


def _attributes(state: Value) -> dict[str, Value] | None:
    """Return the attributes in the state of an object, or None if the state has another form."""
    if state is None:
        return {}
    attributes: dict[str, Value] = {}
    for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):
        if part is None and isinstance(state, tuple):
            continue
        if not isinstance(part, dict):
            return None
        for name, value in part.items():
            if not isinstance(name, str):
                return None
            attributes[name] = value
    return attributes


def _is_flat(value: list[Value] | tuple[Value, ...] | dict[Value, Value]) -> bool:
    return _PLAIN.issuperset(map(type, value.values() if isinstance(value, dict) else value))


def _repeats(attributes: Mapping[str, Value], pairs: Sequence[tuple[Value, Value]]) -> bool:
    """Return True if each attribute equals the value of the key with the same name. True without attributes."""
    values = {key: value for key, value in pairs if isinstance(key, str)}
    return all(label in values and _is_same(values[label], value) for label, value in attributes.items())


def _is_same(first: Value, second: Value) -> bool:
    if first is second:
        return True
    if type(first) not in _PLAIN or type(first) is not type(second):
        return False
    return not (isinstance(first, str | bytes) and len(first) > _SHORT) and first == second


def _qualified_name(name: Global) -> str:
    return f"{name.module}.{name.name}"


def _encode_leaf(leaf: complex | str | bytes | None) -> JSON:
    if isinstance(leaf, float):
        return leaf if math.isfinite(leaf) else float_to_json(leaf)
    if isinstance(leaf, str):
        if leaf.isascii() or not any("\ud800" <= character <= "\udfff" for character in leaf):
            return leaf
        return {"utf8": base64.b64encode(leaf.encode("utf-8", "surrogatepass")).decode("ascii")}
    if leaf is None or isinstance(leaf, bool):
        return leaf
    if isinstance(leaf, int):
        return leaf if abs(leaf) < 1 << 53 else hex(leaf)
    if isinstance(leaf, complex):
        return [_encode_leaf(leaf.real), _encode_leaf(leaf.imag)]
    return base64.b64encode(leaf).decode("ascii")
