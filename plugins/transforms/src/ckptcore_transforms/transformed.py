"""Transformed checkpoints: apply the transforms that a user passes to a load."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import xxhash

from ckptcore.builtin.safetensors_files import read_json_object
from ckptcore.context import Context
from ckptcore.derivations import Constant, Stored, walk
from ckptcore.errors import CheckpointError, ObjectNotFoundError, TransformError, UnsupportedLeafError
from ckptcore.io.elements import bytes_of
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.tree import JSON
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.opening.derived import derive
from ckptcore.opening.open_checkpoints import open_checkpoint
from ckptcore.protocols import DerivedArray, DerivedTree, LeafHandler, TransformedTree, Transforms
from ckptcore.runtime import runtime_of

_METHODS: Final = ("apply", "describe")

_LONGEST: Final = 1200
"""Maximum length of a transform and of its error in a message, in characters, because names can be hostile."""


def apply_transforms(checkpoint: Checkpoint, transforms: Transforms, context: Context) -> Checkpoint:
    """Apply transforms to a checkpoint. Reads no array.

    Args:
        checkpoint: the stored checkpoint.
        transforms: the transforms, in order.
        context: its memory limit for loads also limits temporary memory of the computation.

    Raises:
        TransformError: a transform failed, for example because it matches nothing. The error names the transform.
        CheckpointError: an additional checkpoint cannot be opened.
    """
    expect_transforms(transforms)
    if not transforms:
        return checkpoint
    source = _TransformSource(checkpoint, context)
    tree: TransformedTree = source.tree
    for number, transform in enumerate(transforms):
        try:
            tree = transform.apply(tree)
        except Exception as error:
            if isinstance(error, CheckpointError) and not isinstance(error, TransformError | UnsupportedLeafError):
                raise  # the error of an additional checkpoint, not of the transform
            raise TransformError(
                f"{checkpoint.location.display}, transform {number + 1} of {len(transforms)} "
                f"({_shorten(transform.describe())}): {_shorten(str(error))}. Transforms are applied in order, each to "
                "the result of the ones before; IfPresent allows a transform to match nothing"
            ) from error
    try:
        finished = tree.finish()
    except TransformError as error:
        raise TransformError(f"{checkpoint.location.display}, after {len(transforms)} transforms: {error}") from error
    return derive(
        checkpoint,
        finished.tree,
        finished.arrays,
        values=finished.values,
        additional=source.additional,
        most_bytes=context.memory.load_bytes,
        description=_comparable_description(transforms, finished.arrays.values()),
    )


def describe(transforms: Transforms) -> str:
    """Describe transforms, with one line for each. Applies nothing."""
    expect_transforms(transforms)
    return "\n".join([f"{number}. {transform.describe()}" for number, transform in enumerate(transforms, 1)])


def expect_transforms(transforms: Transforms) -> None:
    """Check that an argument is a list of transforms.

    Raises:
        TypeError: the argument is not a sequence, or one of its entries is not a transform.
    """
    if isinstance(transforms, str | bytes) or not isinstance(transforms, Sequence):
        raise TypeError(
            f"transforms={transforms!r}: expected a list of transforms, such as transforms=[Rename(...), Cast(...)]"
        )
    for transform in transforms:
        if not is_transform(transform):
            raise TypeError(
                f"{transform!r} is not a transform: expected one of ckptcore.transforms, such as Rename(...)"
            )


def is_transform(found: object) -> bool:
    """Return True for an object with the methods of the protocol `Transform`."""
    return not isinstance(found, type) and all(callable(getattr(found, name, None)) for name in _METHODS)


class _TransformSource:
    """The `TransformSource` of one load. Numbers the additional checkpoints that transforms open."""

    def __init__(self, checkpoint: Checkpoint, context: Context) -> None:
        self._checkpoint = checkpoint
        self._context = context
        self.additional: list[Checkpoint] = []
        values = [number for number, record in enumerate(checkpoint.tree.leaves) if not isinstance(record, ArrayRecord)]
        self.tree: Final = self._tree_of(checkpoint.tree, 0, dict(zip(values, values, strict=True)))

    def _tree_of(self, tree: TreeMetadata, checkpoint: int, values: Mapping[int, int]) -> DerivedTree:
        arrays = {
            number: Stored(record.spec, number, checkpoint)
            for number, record in enumerate(tree.leaves)
            if isinstance(record, ArrayRecord) and number not in tree.aliases
        }
        return DerivedTree(tree, arrays, values, self)

    def open(self, location: str | os.PathLike[str]) -> DerivedTree:
        """See `TransformSource`."""
        self.additional.append(open_checkpoint(location, self._context))
        return self._tree_of(self.additional[-1].tree, len(self.additional), {})

    def read_json(self, name: str) -> Mapping[str, JSON] | None:
        """See `TransformSource`."""
        if self._checkpoint.root is not None:
            return None
        try:
            return read_json_object(self._checkpoint.store, name, constants="kept")
        except ObjectNotFoundError:
            return None

    def leaf_handler(self, value: object) -> LeafHandler | None:
        """See `TransformSource`."""
        return runtime_of(self._context).registry.dispatch(value).leaf


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


def _comparable_description(transforms: Transforms, arrays: Iterable[DerivedArray]) -> str:
    """Return a text that ranks compare: the descriptions, and a digest of the elements of constant arrays."""
    constants = {node: None for array in arrays for node in walk(array) if isinstance(node, Constant)}
    values = [constant.value for constant in constants if constant.value.size > 1]
    if not values:
        return describe(transforms)
    digest = xxhash.xxh3_128()
    for value in values:
        digest.update(bytes_of(np.ascontiguousarray(value)))
    return f"{describe(transforms)}\nwith elements of {digest.hexdigest()}"
