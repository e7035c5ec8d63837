"""Leaf handlers of plain tensors and Parameters, and of subclasses over plain memory."""

from __future__ import annotations

import functools
import sys
from collections.abc import Hashable, Sequence
from typing import Any, Final, cast

import numpy as np
import torch

from ckptcore.errors import PluginError, TreeMismatchError, UnsupportedLeafError
from ckptcore.model import (
    WHOLE_SAMPLE_BYTES,
    ArrayRecord,
    ArraySpec,
    Box,
    HostArray,
    LeafRecord,
    Pending,
    Ready,
    Shard,
    StridedMemory,
    ValueRecord,
    sample_steps,
    sampled,
)
from ckptcore.protocols import CheckpointableHandler, HostBytes, HostMemory, LeafHandler, Priority
from ckptcore_torch.abstracts import abstract_like, abstract_subclass, expect_device
from ckptcore_torch.conversions import FRAMEWORK, copy_elements, elements_as, encoding_of, host_view, shares_memory
from ckptcore_torch.sparse_tensors import sparse_or_quantized_handler
from ckptcore_torch.tensor_parts import SubclassPartsHandler, inner_tensor, is_composed, share_parts
from ckptcore_torch.transfers import finish_work_on, start_copy


class TensorHandler(LeafHandler):
    """Handler of `torch.Tensor` and `torch.nn.Parameter`, not of subclasses. Abstract leaves can be meta tensors.

    A loaded tensor is contiguous and has the dtype, device, class and `requires_grad` of the
    abstract leaf. A meta tensor requests a tensor on the CPU.
    """

    priority = Priority.FRAMEWORK

    def describe(self, leaf: Any) -> LeafRecord:
        """Return shape and dtype. For dtypes that are stored as raw bytes, the kind names the dtype."""
        if leaf.layout is not torch.strided or leaf.is_nested:
            raise UnsupportedLeafError(_layout_refusal(leaf))
        return _record(leaf.shape, leaf.dtype)

    def abstract(self, leaf: Any) -> torch.Tensor:
        """Return a meta tensor for a CPU tensor, or a FakeTensor on the same device for others."""
        self.describe(leaf)  # raises an error if the leaf cannot be stored
        return leaf if leaf.is_meta else abstract_like(leaf)

    def parts_handler(self, leaf: Any) -> CheckpointableHandler | None:
        """Return the handler of sparse or quantized tensors, or None for other tensors."""
        if leaf.layout is torch.strided and not leaf.is_quantized:
            return None
        return sparse_or_quantized_handler(leaf)

    def identity(self, leaf: Any) -> Hashable | None:
        """Return address, shape, strides and dtype, or None for a tensor without elements or a wrapper without memory.

        For a tensor that is not on the CPU, or that is lazily conjugated or negated, the result
        also contains the device and the flags for conjugation and negation. A meta tensor has no
        address, so its result contains the storage object instead.
        """
        try:
            address = leaf.data_ptr()
        except RuntimeError:
            return None  # a wrapper without memory: `shards` raises an error
        if not address:
            if not leaf.is_meta or not leaf.numel():
                return None
            # Detached aliases of a meta tensor, such as tied weights in a state dict, share its
            # storage object.
            return ("meta", leaf.untyped_storage()._cdata, leaf.storage_offset(), leaf.shape, leaf.stride(), leaf.dtype)
        if leaf.is_cpu and not leaf.is_conj() and not leaf.is_neg():
            return (address, leaf.shape, leaf.stride(), leaf.dtype)
        return (address, leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.is_conj(), leaf.is_neg())

    def built_type(self, leaf: Any) -> object:
        """Return the class, whether the tensor is a Parameter, and `requires_grad`."""
        return built_type(leaf)

    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard]:
        """Return the whole tensor, assumed equal on all processes.

        Raises:
            UnsupportedLeafError: if the elements are not in memory, as in a meta tensor, a
                FakeTensor or a tensor whose storage was freed.
        """
        _check_has_memory(leaf)
        if not leaf.is_cpu:
            # `view_on_host` may run on another thread, which has another current stream.
            finish_work_on(leaf)
        return _whole_shard(leaf.shape, rank, size)

    def shards_of(self, leaf: Any, process: int | None, rank: int, size: int) -> Sequence[Shard]:
        """Return the whole tensor, also for a meta tensor."""
        return _whole_shard(leaf.shape, rank, size)

    def host_bytes(self, leaf: Any, boxes: Sequence[Box]) -> HostBytes:
        """Return the host memory in bytes that views and copies of the boxes need.

        Views of CPU memory need 0 bytes. A meta tensor counts as a tensor on a device.
        """
        nbytes = sum([box.size for box in boxes]) * encoding_of(leaf.dtype).host.itemsize
        in_memory = leaf.device.type == "cpu" and not leaf.is_conj() and not leaf.is_neg()
        return HostBytes(0 if in_memory else nbytes, nbytes)

    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        """Copy boxes to the host. CUDA copies run on a side stream, after pending work of the current stream."""
        if not leaf.numel():
            return _without_elements(leaf, boxes)
        if leaf.is_cpu and not leaf.is_conj() and not leaf.is_neg():
            whole = host_view(leaf)
            return [memory.copy(_view_box(whole, box)) for box in boxes]
        encoding = encoding_of(leaf.dtype)
        copies: list[Pending[HostArray]] = []
        for box in boxes:
            target = memory.empty(ArraySpec(box.shape, encoding.name))
            copies.append(start_copy(leaf[box.slices], target))
        return copies

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        """Return views of CPU memory, and copies from other devices."""
        _check_has_memory(leaf)
        if not leaf.numel():
            return _without_elements(leaf, boxes)
        if not leaf.is_cpu:
            encoding = encoding_of(leaf.dtype)
            return [start_copy(leaf[box.slices], np.empty(box.shape, encoding.host)) for box in boxes]
        whole = host_view(leaf)
        return [Ready(_view_box(whole, box)) for box in boxes]

    def sample(self, leaf: Any, stored: ArrayRecord, box: Box) -> Sequence[Pending[HostArray]] | None:
        """Return the sample of a box. A device samples a large tensor itself, and transfers only the sample."""
        encoding = None if leaf.is_cpu else encoding_of(leaf.dtype)
        if encoding is None or box.size * encoding.host.itemsize <= WHOLE_SAMPLE_BYTES:
            (view,) = self.view_on_host(leaf, [box])
            return [Ready(part) for part in sampled(view.result())]
        parts = sampled_on_device(leaf[box.slices], encoding.host.itemsize)
        return [start_copy(part, np.empty(part.shape, encoding.host)) for part in parts]

    def wanted(self, abstract: Any, stored: ArrayRecord) -> Sequence[Box]:
        """Return the whole array."""
        return _whole_box(stored.spec.shape)

    def destination(self, abstract: Any, stored: ArrayRecord, box: Box) -> HostArray | None:
        """Return the memory of a contiguous CPU tensor with the stored dtype and shape, or None for other tensors."""
        if not abstract.is_cpu or abstract.layout is not torch.strided or not abstract.is_contiguous():
            return None
        spec = stored.spec
        if abstract.shape != spec.shape or encoding_of(abstract.dtype).name != spec.dtype or box.shape != spec.shape:
            return None
        if abstract.is_conj() or abstract.is_neg() or not abstract.data_ptr():
            return None
        array = host_view(abstract)
        flags = array.flags
        return array if flags.writeable and flags.c_contiguous else None

    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """Build a tensor over the host array. Copies only if the dtype or device differs."""
        tensor = _cast_elements(abstract, stored, boxes)
        device = abstract.device
        if device != _CPU and device.type != "meta":  # not `is_cpu`, which is False for a FakeTensor on the CPU
            tensor = tensor.to(device)
        # Compare types first, because isinstance calls the metaclass of Parameter, which is slow.
        if type(abstract) is not torch.Tensor and isinstance(abstract, torch.nn.Parameter):
            return torch.nn.Parameter(tensor, requires_grad=abstract.requires_grad)
        return tensor.requires_grad_() if abstract.requires_grad else tensor

    def fill(self, target: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> bool:
        """Copy into a tensor with any strides and device, and increment its autograd version.

        Return False for meta tensors, and for tensors whose strides may make elements overlap.

        Raises:
            UnsupportedLeafError: if the storage of the tensor was freed.
        """
        if target.is_meta or overlaps_itself(target):
            return False
        if target.numel() and not target.data_ptr() and not target.untyped_storage().nbytes():
            raise UnsupportedLeafError(f"{_FREED}; gather the parameters before loading into them")
        if len(boxes) == 1 and shares_memory(boxes[0][1], target):  # already read into the memory of the tensor
            torch.autograd.graph.increment_version(target)
            return True
        source = _cast_elements(target, stored, boxes)
        if target.is_inference():
            with torch.inference_mode():  # an inference tensor can be changed only in inference mode
                copy_elements(target, source)
        else:
            with torch.no_grad():
                copy_elements(target, source)
        return True

    def memory_to_fill(self, target: Any) -> Sequence[StridedMemory] | None:
        """Return the memory of the elements on any device, or None if `fill` returns False."""
        if target.is_meta or overlaps_itself(target):
            return None
        if not target.data_ptr():
            return []
        itemsize = target.element_size()
        strides = tuple([stride * itemsize for stride in target.stride()])
        space = "host" if target.is_cpu else str(target.device)
        encoding = encoding_of(target.dtype).name
        if target.is_conj() or target.is_neg():
            encoding += f" conj={target.is_conj()} neg={target.is_neg()}"
        return [StridedMemory(space, target.data_ptr(), tuple(target.shape), strides, itemsize, encoding)]


class SubclassHandler(LeafHandler):
    """Handler of tensor subclasses over plain memory, and of FakeTensors as abstract leaves.

    Only elements are saved. A loaded leaf has the class and attributes of the abstract leaf.
    Subclasses composed of other tensors have the handler of their parts.
    """

    priority = Priority.FRAMEWORK

    def describe(self, leaf: Any) -> LeafRecord:
        """Return shape and dtype."""
        if is_uninitialized(leaf):
            raise UnsupportedLeafError(
                "a parameter of a lazy module has no shape before the first call of the "
                "module; call the module once, then save it or load into it"
            )
        if is_fake(leaf):
            return _record(torch.Size([_fixed_extent(extent) for extent in leaf.shape]), leaf.dtype)
        return _PLAIN.describe(_as_plain(leaf))

    def abstract(self, leaf: Any) -> torch.Tensor:
        """Return a meta tensor with the class and attributes of the leaf. Return a FakeTensor itself.

        Raises:
            UnsupportedLeafError: if the leaf cannot be stored, or is on a device other than the CPU and the meta
                device.
        """
        self.describe(leaf)  # raises an error if the leaf cannot be stored
        if is_fake(leaf):
            return cast(torch.Tensor, leaf)
        plain = _as_plain(leaf)
        return cast(torch.Tensor, leaf) if plain.is_meta else abstract_subclass(plain, leaf)

    def parts_handler(self, leaf: Any) -> CheckpointableHandler | None:
        """Return the handler of tensors that are composed of other tensors, or None for other tensors."""
        return _PARTS if is_composed(leaf) else None

    def identity(self, leaf: Any) -> Hashable | None:
        """Return the identity of the plain tensor, or an id of a FakeTensor object."""
        return ("fake", id(leaf)) if is_fake(leaf) else _PLAIN.identity(_as_plain(leaf))

    def built_type(self, leaf: Any) -> object:
        """Return the class, whether the tensor is a Parameter, `requires_grad`, and the ids of attributes."""
        # `built_type` is compared while the leaves keep their attributes alive.
        return (built_type(leaf), tuple([(name, id(value)) for name, value in vars(leaf).items()]))

    def shards_of(self, leaf: Any, process: int | None, rank: int, size: int) -> Sequence[Shard]:
        """Return the whole tensor, also for a FakeTensor."""
        return _whole_shard(leaf.shape, rank, size)

    def host_bytes(self, leaf: Any, boxes: Sequence[Box]) -> HostBytes:
        """Return the size of the plain tensor on the same device."""
        return _PLAIN.host_bytes(leaf if is_fake(leaf) else _as_plain(leaf), boxes)

    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard]:
        """Return the shards of the plain tensor."""
        return _PLAIN.shards(leaf if is_fake(leaf) else _as_plain(leaf), rank, size)

    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: HostMemory) -> Sequence[Pending[HostArray]]:
        """Copy the plain tensor."""
        return _PLAIN.copy_to_host(_as_plain(leaf), boxes, memory)

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        """View the plain tensor."""
        return _PLAIN.view_on_host(_as_plain(leaf), boxes)

    def sample(self, leaf: Any, stored: ArrayRecord, box: Box) -> Sequence[Pending[HostArray]] | None:
        """Return the sample of the plain tensor."""
        return _PLAIN.sample(_as_plain(leaf), stored, box)

    def wanted(self, abstract: Any, stored: ArrayRecord) -> Sequence[Box]:
        """Return the whole array.

        Raises:
            UnsupportedLeafError: if a FakeTensor requests a device that is missing.
        """
        if is_fake(abstract):
            expect_device(abstract.device)
        return _whole_box(stored.spec.shape)

    def destination(self, abstract: Any, stored: ArrayRecord, box: Box) -> HostArray | None:
        """Return the memory of the plain tensor, or None for a FakeTensor."""
        return None if is_fake(abstract) else _PLAIN.destination(_as_plain(abstract), stored, box)

    def build(self, abstract: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> object:
        """Build a tensor with the class and attributes of `abstract`, or a plain one for a FakeTensor."""
        if is_fake(abstract):
            return _PLAIN.build(abstract, stored, boxes)
        with torch._C.DisableTorchFunctionSubclass():
            plain = _PLAIN.build(_as_plain(abstract), stored, boxes)
            # `build` returns a tensor, although its type says object.
            built: torch.Tensor = plain.detach().as_subclass(type(abstract))  # type: ignore[attr-defined]
            built.__dict__.update(abstract.__dict__)
            return built.requires_grad_(abstract.requires_grad)

    def fill(self, target: Any, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> bool:
        """Fill the plain tensor. Return False for a FakeTensor."""
        return False if is_fake(target) else _PLAIN.fill(_as_plain(target), stored, boxes)

    def memory_to_fill(self, target: Any) -> Sequence[StridedMemory] | None:
        """Return the memory of the plain tensor, or None for a FakeTensor."""
        return None if is_fake(target) else _PLAIN.memory_to_fill(_as_plain(target))


_CPU: Final = torch.device("cpu")
_FREED: Final = "the storage of this tensor was freed, as FSDP does with unused parameters"
_PLAIN: Final = TensorHandler()
_PARTS: Final = SubclassPartsHandler()


def is_uninitialized(leaf: object) -> bool:
    """Return True for parameters and buffers of unused lazy modules, which raise errors on most accesses."""
    return isinstance(leaf, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer)


def is_sharded(leaf_type: type) -> bool:
    """Return True for the type ShardedTensor, which raises errors or warnings on most accesses."""
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return module is not None and issubclass(leaf_type, module.ShardedTensor)


def same_memory(held: object, given: object) -> bool:
    """Return True if two values are the same tensor or views of the same elements, so that no copy is needed.

    Tensors without elements need only the same shape and dtype. Return False for two DTensors,
    unless they are the same object or consist of the same parts.
    """
    if held is given:
        return True
    if not isinstance(held, torch.Tensor) or not isinstance(given, torch.Tensor):
        return False
    if is_uninitialized(held) or is_sharded(type(held)) or held.is_meta:
        return False
    if is_composed(inner_tensor(held)):
        return share_parts(inner_tensor(held), inner_tensor(given))
    if not held.numel():
        return held.shape == given.shape and held.dtype == given.dtype
    identity = identity_of(held)
    return identity is not None and identity == identity_of(given)


def identity_of(held: object) -> Hashable | None:
    """Return a value that is equal only for tensors over the same elements.

    Return None for other objects, or if it is unknown.
    """
    if not isinstance(held, torch.Tensor) or is_uninitialized(held) or is_sharded(type(held)) or is_fake(held):
        return None
    if hasattr(held, "__tensor_flatten__") or held.layout is not torch.strided:
        return None
    return _PLAIN.identity(held)


def built_type(leaf: torch.Tensor) -> object:
    """Return the class, whether the tensor is a Parameter, as a DTensor can be, and `requires_grad`."""
    return (type(leaf), isinstance(leaf, torch.nn.Parameter), leaf.requires_grad)


# Cached, because few shapes occur many times. The results are frozen.
@functools.lru_cache(maxsize=4096)
def _record(shape: torch.Size, dtype: torch.dtype) -> ArrayRecord:
    encoding = encoding_of(dtype)
    return ArrayRecord(ArraySpec(tuple(shape), encoding.name), encoding.kind, notes=FRAMEWORK)


@functools.lru_cache(maxsize=4096)
def _whole_shard(shape: torch.Size, rank: int, size: int) -> tuple[Shard, ...]:
    return (Shard(Box.whole(tuple(shape)), rank, size),)


@functools.lru_cache(maxsize=4096)
def _whole_box(shape: tuple[int, ...]) -> tuple[Box, ...]:
    return (Box.whole(shape),)


def _without_elements(leaf: torch.Tensor, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
    """Return empty host arrays. PyTorch cannot copy empty meta tensors, and has no NumPy views of empty ZeroTensors."""
    return [Ready(np.empty(box.shape, encoding_of(leaf.dtype).host)) for box in boxes]


def _view_box(whole: HostArray, box: Box) -> HostArray:
    if box.stop == whole.shape and not any(box.start):
        return whole
    part: HostArray = whole[box.slices]
    return part


def _cast_elements(abstract: torch.Tensor, stored: LeafRecord, boxes: Sequence[tuple[Box, HostArray]]) -> torch.Tensor:
    """Return a CPU tensor of the stored elements, cast to the dtype of `abstract`."""
    stored = expect_shape("tensor", tuple(abstract.shape), stored)
    if len(boxes) != 1 or boxes[0][1].shape != stored.spec.shape:
        raise PluginError(
            f"internal error: a whole tensor of {stored.spec} was requested, but {len(boxes)} boxes were read; "
            "please report this"
        )
    return elements_as(boxes[0][1], stored, abstract.dtype)


def expect_shape(noun: str, shape: tuple[int, ...], stored: LeafRecord) -> ArrayRecord:
    """Return a stored array.

    Raise an error if its shape is not the requested one. A load has compared all leaves before.

    Raises:
        TreeMismatchError: if a value or another shape is stored.
    """
    if isinstance(stored, ArrayRecord) and stored.spec.shape == shape:
        return stored
    description = (
        f"a {stored.kind}" if isinstance(stored, ValueRecord) else f"an array of the shape {stored.spec.shape}"
    )
    difference = f"{description} is stored, requested as a {noun} of the shape {shape}"
    raise TreeMismatchError(difference, [difference])


def sampled_on_device(tensor: torch.Tensor, itemsize: int) -> Sequence[torch.Tensor]:
    """Return the elements of a large tensor that `ckptcore.model.sampled` would take from its host array."""
    step, taken = sample_steps(itemsize)
    flat = tensor.detach().reshape(-1)
    rows = flat.numel() // step
    return (flat[: rows * step].view(rows, step)[:, :taken], flat[-taken:])


def _check_has_memory(leaf: torch.Tensor) -> None:
    if is_fake(leaf):
        raise UnsupportedLeafError("a FakeTensor has no elements to save; save the real tensor")
    try:
        if leaf.data_ptr() or not leaf.numel():
            return
    except RuntimeError as error:
        raise UnsupportedLeafError(
            f"cannot save a {type(leaf).__name__} without memory ({error}); save the tensors that it is composed of"
        ) from error
    if leaf.is_meta:
        raise UnsupportedLeafError(
            "a meta tensor has no elements to save: it can only be used in an abstract tree; save the real tensor"
        )
    raise UnsupportedLeafError(f"{_FREED}; gather the parameters before saving them")


def overlaps_itself(target: torch.Tensor) -> bool:
    """Return True if elements of a strided tensor may share memory, as after ``expand``."""
    if target.layout is not torch.strided or target.is_contiguous():
        return False
    reach = 1
    for stride, extent in sorted(zip(target.stride(), target.shape, strict=True)):
        if extent > 1:
            if stride < reach:
                return True
            reach = stride * (extent - 1) + reach
    return False


def _layout_refusal(leaf: torch.Tensor) -> str:
    if leaf.is_nested:
        return "a nested tensor with strides is several arrays; save list(tensor.unbind())"
    return f"a tensor with the layout {leaf.layout} is not one array of elements; save its .to_dense()"


def is_fake(leaf: torch.Tensor) -> bool:
    """Return True for a FakeTensor, which has a device but no elements."""
    if type(leaf) is torch.Tensor:  # most leaves: isinstance is slow for classes of tensors
        return False
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(leaf, module.FakeTensor)


def _fixed_extent(extent: Any) -> int:
    if type(extent) is not int:
        raise UnsupportedLeafError(
            f"a FakeTensor with the symbolic extent {extent} has no fixed shape; create it with static shapes"
        )
    return extent


def _as_plain(leaf: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a `torch.Tensor`.

    Raises:
        UnsupportedLeafError: for subclasses that are composed of other tensors.
    """
    name = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    if hasattr(leaf, "__tensor_flatten__"):  # other composed tensors have the handler of their parts
        remedy = (
            "save its .values() and .offsets(), or list(tensor.unbind())"
            if leaf.is_nested
            else "save the tensors that its __tensor_flatten__() names, or add __tensor_unflatten__ to its class"
        )
        raise UnsupportedLeafError(f"a {name} is composed of other tensors and is not one array in memory; {remedy}")
    if _is_masked(leaf):
        raise UnsupportedLeafError(f"a {name} is two arrays; save its .get_data() and .get_mask()")
    try:
        # Without this, the __torch_function__ of a subclass could intercept the calls and wrap
        # their results.
        with torch._C.DisableTorchFunctionSubclass():
            plain = leaf.detach().as_subclass(torch.Tensor)
            return plain.requires_grad_() if leaf.requires_grad else plain
    except (TypeError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
        raise UnsupportedLeafError(
            f"a {name} is not one array in memory ({str(error).splitlines()[0]}); save the "
            "tensors that it is composed of as separate leaves"
        ) from error


def _is_masked(leaf: torch.Tensor) -> bool:
    """Return True for a MaskedTensor, which consists of elements and a mask."""
    module = sys.modules.get("torch.masked.maskedtensor.core")
    return module is not None and isinstance(leaf, module.MaskedTensor)
