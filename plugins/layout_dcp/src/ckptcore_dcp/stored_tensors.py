"""Tensors in the pickles of torch, with validation of their bounds, and their dtypes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol, TypeAlias

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import JSON, PLAIN_ARRAY, ArrayRecord, ArraySpec, Box
from ckptcore_dcp.pickles import Call, Global, Persistent, Value, brief

STORAGES: Final[Mapping[str, str]] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}
"""Dtype of each typed storage. Other dtypes use an untyped storage, and the tensor names its dtype."""

TORCH_DTYPES: Final[Mapping[str, str]] = {
    **{name: name for name in STORAGES.values()},
    **{f"uint{bits}": f"uint{bits}" for bits in (16, 32, 64)},
    **{name: name for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")},
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "cfloat": "complex64",
    "cdouble": "complex128",
}
"""ckptcore's dtype name for each name in the module ``torch``."""

_RAW_BYTES: Final = frozenset(["float4_e2m1fn_x2", *(f"{sign}int{bits}" for bits in range(1, 8) for sign in ("", "u"))])
"""One-byte dtypes that NumPy lacks. Stored as uint8, with the torch dtype in the kind of the leaf."""

FRAMEWORK: Final[Mapping[str, JSON]] = {"framework": "torch"}
"""Notes of a tensor. If the target of a load lacks the leaf, these notes make the load create a torch tensor."""

_OF_TORCH: Final = "torch."
"""Prefix of the kind of a leaf with raw bytes. The name of the torch dtype follows."""

_WRITTEN: Final = frozenset(["torch.float4_e2m1fn_x2"])
"""Kinds of `_RAW_BYTES` that torch.distributed.checkpoint can save and load (torch 2.13.0)."""


def known_dtype(name: str) -> str | None:
    """Return the canonical name of a torch dtype, or None if it is not supported."""
    return name if name in _RAW_BYTES else TORCH_DTYPES.get(name)


def spec_and_kind(dtype: str, shape: tuple[int, ...]) -> tuple[ArraySpec, str]:
    """Return the array spec and the kind of the leaf for a tensor. `dtype` comes from `known_dtype`."""
    if dtype in _RAW_BYTES:
        return ArraySpec(shape, "uint8"), _OF_TORCH + dtype
    return ArraySpec(shape, dtype), PLAIN_ARRAY


@functools.lru_cache(maxsize=512)  # many tensors have one shape
def record_of_tensor(dtype: str, shape: tuple[int, ...]) -> ArrayRecord:
    """Return the record of a tensor that PyTorch saved, without cuts. `dtype` comes from `known_dtype`."""
    return ArrayRecord(*spec_and_kind(dtype, shape), notes=FRAMEWORK)


def torch_dtype(dtype: str, kind: str) -> str:
    """Return the torch dtype of a leaf. Kinds that torch.distributed.checkpoint cannot save become uint8."""
    return kind.removeprefix(_OF_TORCH) if dtype == "uint8" and kind in _WRITTEN else dtype


def physical_spec(spec: ArraySpec) -> ArraySpec:
    """Return the spec that torch sees.

    Times are int64. A dtype that torch lacks becomes uint8 with the bytes of an element as last
    axis.
    """
    if TORCH_DTYPES.get(spec.dtype) == spec.dtype:
        return spec
    dtype = spec.numpy_dtype
    if dtype.kind in "mM":
        return ArraySpec(spec.shape, "int64")
    return ArraySpec((*spec.shape, dtype.itemsize), "uint8")


def physical_box(spec: ArraySpec, box: Box) -> Box:
    """Return the box in the array that torch sees. See `physical_spec`."""
    physical = physical_spec(spec)
    if len(physical.shape) == len(spec.shape):
        return box
    return Box((*box.start, 0), (*box.stop, physical.shape[-1]))


_MAX_AXES: Final = 64
_MAX_COUNT: Final = 1 << 62
_MAX_REPETITION: Final = 64
"""Maximum ratio of the size of an array to its storage, for views that repeat elements."""
_ALWAYS_ALLOWED_BYTES: Final = 1 << 26
"""Size that a view with repeated elements may always have, in bytes."""

_TENSOR_TYPES: Final = frozenset(
    [
        Global("torch", "Tensor"),
        Global("torch._tensor", "Tensor"),
        Global("torch.nn.parameter", "Parameter"),
        Global("torch.nn.parameter", "Buffer"),
    ]
)
_REMEDIES: Final[Mapping[str, str]] = {
    "_rebuild_sparse_tensor": "a sparse tensor: save its indices and values, or tensor.to_dense()",
    "_rebuild_sparse_csr_tensor": "a sparse tensor: save its indices and values, or tensor.to_dense()",
    "_rebuild_qtensor": "a quantized tensor: save tensor.int_repr() with its scale and zero point, "
    "or tensor.dequantize()",
    "_rebuild_nested_tensor": "a nested tensor: save the tensors of tensor.unbind()",
    "_rebuild_meta_tensor_no_storage": "a tensor on the meta device, which has no elements: materialize it first",
    "_rebuild_wrapper_subclass": "an instance of a tensor subclass: save the plain tensors it contains "
    "(DTensor.full_tensor())",
    "_rebuild_device_tensor_from_numpy": "a tensor of a device that torch saves as a NumPy array: save tensor.cpu()",
    "_rebuild_xla_tensor": "a tensor of a device that torch saves as a NumPy array: save tensor.cpu()",
}


ByteForm: TypeAlias = Literal["bytes", "text", "escaped text", "escaped bytes"]


@dataclass(frozen=True, slots=True)
class PickledBytes:
    """Bytes that a pickle contains.

    Attributes:
        start: their offset in the pickle, in bytes.
        nbytes: their length in the pickle.
        size: their length after decoding.
        form: their encoding in the pickle. ``bytes``: unchanged. ``text``: UTF-8 text with one code point for each
            byte (protocols 1 and 2). ``escaped text``: such a text in one line with escapes (protocol 0).
            ``escaped bytes``: a quoted string of Python 2 with escapes.
        big_endian: True if the elements are big endian.
    """

    start: int
    nbytes: int
    size: int
    form: ByteForm = "bytes"
    big_endian: bool = False


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor whose elements are in a storage outside the pickle, or a NumPy array whose bytes are in the pickle.

    Attributes:
        storage: key of the storage; its bytes are in the member ``data/`` + key.
        dtype: ckptcore's dtype of the elements.
        shape: elements along each axis.
        strides: distance between elements along each axis, in elements; never negative.
        offset: position of the first element in the storage, in elements.
        kind: kind of the leaf: `PLAIN_ARRAY`, or ``torch.`` and a dtype whose bytes are stored raw.
        storage_bytes: length of the storage according to the pickle, in bytes.
        requires_grad: torch's ``requires_grad``.
        framework: the framework whose array it was; None for NumPy.
        pickled: the bytes of a NumPy array.
        in_bytes: True if strides and offset count bytes, as for the fields of a structure.
    """

    storage: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    kind: str = PLAIN_ARRAY
    storage_bytes: int = 0
    requires_grad: bool = False
    framework: str | None = "torch"
    pickled: PickledBytes | None = None
    in_bytes: bool = False

    @property
    def physical(self) -> StoredTensor:
        """The tensor as an array of bytes with one more axis, if its strides count bytes; else the tensor itself."""
        if not self.in_bytes:
            return self
        itemsize = self.itemsize
        return replace(self, dtype="uint8", shape=(*self.shape, itemsize), strides=(*self.strides, 1), in_bytes=False)

    @property
    def spec(self) -> ArraySpec:
        """Shape and dtype."""
        return ArraySpec(self.shape, self.dtype)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.spec.numpy_dtype.itemsize

    @property
    def span(self) -> int:
        """Distance from the first element to the end of the last, in elements; zero for empty tensors."""
        if 0 in self.shape:
            return 0
        return 1 + sum(stride * (extent - 1) for stride, extent in zip(self.strides, self.shape, strict=True))

    @property
    def is_contiguous(self) -> bool:
        """True if the elements are in C order without gaps."""
        if 0 in self.shape:
            return True
        expected = zip(self.shape, self.strides, c_strides(self.shape), strict=True)
        return all(extent == 1 or stride == step for extent, stride, step in expected)


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of an array in C order, in elements."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


class FindStorage(Protocol):
    """Finds a storage that is embedded in a value of a pickle."""

    def __call__(self, value: Value, /) -> tuple[Persistent, PickledBytes] | None:
        """Return the storage and the place of its elements; None if the value has no embedded storage."""
        ...


def stored_tensor(value: Value, *, key: str, path: str, embedded: FindStorage | None = None) -> StoredTensor | None:
    """Return the tensor, or the bare storage, that a pickled value describes; None for other values.

    Recognises the functions of ``torch/_utils.py`` and ``torch/_tensor.py`` that
    `Tensor.__reduce_ex__` names.

    Args:
        value: result of `read_pickle`.
        key: the object that contains the pickle, for errors.
        path: path in the tree, for errors.
        embedded: finds storages inside the pickle.

    Raises:
        CorruptCheckpointError: the tensor is invalid.
        UnsupportedLeafError: no array can represent the tensor.
    """
    grad = False
    casts: set[tuple[str, str]] = set()
    for _ in range(8):  # calls are nested, such as a tensor in a parameter in a subclass
        if isinstance(value, Persistent):
            return _whole_storage(value, key, path)
        if not isinstance(value, Call) or not isinstance(value.function, Global):
            return None
        function, arguments = value.function, value.arguments
        if embedded is not None and (found_storage := embedded(value)) is not None:
            whole = _whole_storage(found_storage[0], key, path)
            return None if whole is None else _inside(whole, value, found_storage[1])
        if function.module == "torch._tensor" and function.name == "_rebuild_from_type_v2":
            made, of_type, inner = _first_arguments(arguments, 3, key, path)
            if not isinstance(of_type, Global) or of_type not in _TENSOR_TYPES or not isinstance(inner, tuple):
                raise _unsupported(path, _REMEDIES["_rebuild_wrapper_subclass"])
            value = Call(made, inner)
            continue
        if function.module == "torch._tensor" and function.name.startswith("_rebuild"):
            raise _unsupported(path, "a tensor of an unknown kind")
        if function.module != "torch._utils" or not function.name.startswith("_rebuild"):
            return None
        match function.name:
            case "_rebuild_parameter" | "_rebuild_parameter_with_state":
                value, requires_grad = _first_arguments(arguments, 2, key, path)
                grad = grad or requires_grad is True
            case "_rebuild_device_tensor_from_cpu_tensor":
                value, dtype, _, requires_grad = _first_arguments(arguments, 4, key, path)
                grad = grad or requires_grad is True
                casts.add(_dtype_of(dtype, key, path))
            case "_rebuild_tensor" | "_rebuild_tensor_v2" | "_rebuild_tensor_v3":
                inner_storage = None if embedded is None or not arguments else embedded(arguments[0])
                if inner_storage is not None:
                    arguments = (inner_storage[0], *arguments[1:])
                tensor = _rebuild(function.name, arguments, grad, key, path)
                if inner_storage is not None:
                    tensor = _inside(tensor, value.arguments[0], inner_storage[1])
                if not casts <= {(tensor.dtype, tensor.kind)}:
                    raise _unsupported(path, "a tensor that is cast as it is loaded: save tensor.cpu()")
                return tensor
            case name:
                raise _unsupported(path, _REMEDIES.get(name, f"built by torch._utils.{name}, which is not supported"))
    raise _corrupt(key, path, "too many nested calls that build a tensor")


def _inside(tensor: StoredTensor, storage: Value, place: PickledBytes) -> StoredTensor:
    """Return a tensor whose storage is in the pickle. Tensors with the same `storage` object share their elements."""
    return replace(tensor, storage=f"pickle:{id(storage)}", pickled=place)


def check_bounds(tensor: StoredTensor, nbytes: int, *, key: str, path: str) -> None:
    """Check that the elements of a tensor are in its storage, and that a view is not far larger than its storage.

    Args:
        tensor: the tensor, from a pickle.
        nbytes: actual length of its storage, in bytes.
        key: the object that contains the storage, for errors.
        path: path in the tree, for errors.

    Raises:
        CorruptCheckpointError: elements are outside the storage.
        UnsupportedLeafError: the tensor expands a few bytes to too many elements.
    """
    span = tensor.span
    if span and (tensor.offset + span) * tensor.itemsize > nbytes:
        raise _corrupt(
            key,
            path,
            f"its elements end at byte {(tensor.offset + span) * tensor.itemsize} of a storage of {nbytes} bytes",
        )
    spec = tensor.spec
    if not spec.is_possible:
        raise _corrupt(key, path, f"{spec} is not a possible array")
    if spec.nbytes > max(_ALWAYS_ALLOWED_BYTES, _MAX_REPETITION * nbytes):
        raise _unsupported(
            path,
            f"a view (expand) of {spec.nbytes} bytes over a storage of {nbytes}: save the tensor that it is a view of",
        )


def storage_size(value: Persistent, *, key: str) -> tuple[str, str, int]:
    """Return the key, element dtype and element count of a storage that a pickle refers to.

    Raises:
        CorruptCheckpointError: the reference is invalid.
        UnsupportedLeafError: no array can have such elements.
    """
    name, dtype, count, _ = _storage(value, key, "a storage")
    return name, dtype, count


def _rebuild(name: str, arguments: tuple[Value, ...], grad: bool, key: str, path: str) -> StoredTensor:
    storage, offset, size, steps = _first_arguments(arguments, 4, key, path)
    if not isinstance(storage, Persistent):
        raise _corrupt(key, path, "a tensor has no storage")
    storage_key, dtype, count, view = _storage(storage, key, path)
    itemsize = ArraySpec((), dtype).numpy_dtype.itemsize
    kind = PLAIN_ARRAY
    shape, strides = _int_tuple(size, key, path), _int_tuple(steps, key, path)
    storage_bytes = count * itemsize
    shift = view * itemsize
    requires_grad = len(arguments) > 4 and arguments[4] is True
    flags: Value = None
    if name == "_rebuild_tensor_v3":
        if len(arguments) < 7:
            raise _corrupt(key, path, "a tensor has no dtype")
        dtype, kind = _dtype_of(arguments[6], key, path)
        flags = arguments[7] if len(arguments) > 7 else None
    elif len(arguments) > 6:
        flags = arguments[6]
    if isinstance(flags, dict) and any(flags.get(bit) for bit in ("conj", "neg")):
        raise _unsupported(path, "a conjugated or negated view: save tensor.resolve_conj().resolve_neg()")
    if len(shape) != len(strides) or len(shape) > _MAX_AXES:
        raise _corrupt(key, path, f"a tensor of {len(shape)} axes has {len(strides)} strides")
    itemsize = ArraySpec((), dtype).numpy_dtype.itemsize
    if type(offset) is not int or not 0 <= offset < _MAX_COUNT or shift % itemsize:
        raise _corrupt(key, path, f"a tensor cannot begin at element {str(offset)[:40]} of its storage")
    if math.prod(max(extent, 1) for extent in shape) >= _MAX_COUNT:
        raise _corrupt(key, path, "a tensor has more elements than memory can address")
    return StoredTensor(
        storage_key, dtype, shape, strides, offset + shift // itemsize, kind, storage_bytes, grad or requires_grad
    )


def _whole_storage(value: Persistent, key: str, path: str) -> StoredTensor | None:
    parts = value.id
    if not isinstance(parts, tuple) or not parts or parts[0] not in ("storage", b"storage"):
        return None
    storage, dtype, count, view = _storage(value, key, path)
    itemsize = ArraySpec((), dtype).numpy_dtype.itemsize
    extent = count
    if len(parts) == 6 and isinstance(parts[5], tuple) and isinstance(parts[5][2], int):
        extent = parts[5][2]
    return StoredTensor(storage, dtype, (extent,), (1,), view, storage_bytes=count * itemsize)


def _storage(value: Persistent, key: str, path: str) -> tuple[str, str, int, int]:
    """Return key, element dtype and element count of a storage, and the element at which a view begins.

    A reference is ``("storage", type, key, location, elements)``. The format before torch 1.6 adds
    a sixth item: None or ``(key, offset, elements)`` (``torch/serialization.py``).
    """
    parts = value.id
    if not isinstance(parts, tuple) or not 5 <= len(parts) <= 6 or parts[0] not in ("storage", b"storage"):
        raise _corrupt(
            key, path, f"{str(parts)[:80] if not isinstance(parts, tuple) else 'a tuple'} is not a storage reference"
        )
    kind, storage_key, count = parts[1], parts[2], parts[4]
    if isinstance(storage_key, int) and not isinstance(storage_key, bool):
        storage_key = str(storage_key) if 0 <= storage_key < _MAX_COUNT else ""
    if not isinstance(storage_key, str) or not storage_key or type(count) is not int or not 0 <= count < _MAX_COUNT:
        raise _corrupt(key, path, "the key or the length of a storage is missing")
    if not isinstance(kind, Global) or not (kind.module == "torch" or kind.module.startswith("torch.")):
        raise _corrupt(key, path, "the type of a storage is missing")
    dtype = "uint8" if kind.name == "UntypedStorage" else STORAGES.get(kind.name)
    if dtype is None:
        raise _unsupported(
            path, f"a tensor in a {kind.name[:40]}, which NumPy cannot represent: save a view of it as integers"
        )
    offset = 0
    if len(parts) == 6 and parts[5] is not None:
        described = parts[5]
        if not isinstance(described, tuple) or len(described) != 3:
            raise _corrupt(key, path, "a view of a storage is malformed")
        offset, length = _natural(described[1], key, path), _natural(described[2], key, path)
        if offset + length > count:
            raise _corrupt(key, path, f"a view exceeds its storage of {count} elements")
    return storage_key, dtype, count, offset


def _dtype_of(value: Value, key: str, path: str) -> tuple[str, str]:
    """Return ckptcore's dtype and the kind of the leaf for a torch dtype."""
    if not isinstance(value, Global) or value.module != "torch":
        raise _corrupt(key, path, "the dtype of a tensor is missing")
    if (known := known_dtype(value.name)) is not None:
        spec, kind = spec_and_kind(known, ())
        return spec.dtype, kind
    raise _unsupported(
        path, f"a tensor of torch.{value.name[:40]}, which NumPy cannot represent: save a view of it as integers"
    )


def _first_arguments(arguments: tuple[Value, ...], count: int, key: str, path: str) -> tuple[Value, ...]:
    if len(arguments) < count:
        raise _corrupt(key, path, f"a tensor is described by {len(arguments)} arguments; expected at least {count}")
    return arguments[:count]


def _int_tuple(value: Value, key: str, path: str) -> tuple[int, ...]:
    if isinstance(value, Call) and value.function == Global("torch", "Size") and len(value.arguments) == 1:
        value = value.arguments[0]
    if not isinstance(value, tuple | list):
        raise _corrupt(key, path, "the shape or the strides of a tensor are missing")
    return tuple([_natural(number, key, path) for number in value])


def _natural(value: Value, key: str, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_COUNT:
        raise _corrupt(key, path, f"expected a non-negative integer, found {brief(value)}")
    return value


def _unsupported(path: str, what: str) -> UnsupportedLeafError:
    return UnsupportedLeafError(f"{path} is {what}")


def _corrupt(key: str, path: str, reason: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path} in {key!r} cannot be read: {reason}; restore the file from a copy, or load another checkpoint", key=key
    )
