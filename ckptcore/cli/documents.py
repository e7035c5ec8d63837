"""What ``--json`` prints: one document per command, of one of these types.

``schema`` names the type and its version. Within a version members are only added; a reader should ignore those it does
not know. Sizes are in bytes, times ISO 8601 in UTC. Members of a leaf that stand for containers, arrays and values are
those of `LeafDocument`; ``path`` is for people, ``keys`` for programs.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypeAlias, TypedDict

from ckptcore.model import JSON

__all__ = [
    "AttributeKey",
    "ContainerDocument",
    "ConvertDocument",
    "DiffDocument",
    "DifferenceDocument",
    "ErrorDocument",
    "FailedPluginDocument",
    "InspectDocument",
    "KeyDocument",
    "LeafDocument",
    "ListDocument",
    "ListedDocument",
    "ObjectDocument",
    "PluginDocument",
    "PluginsDocument",
    "ProblemDocument",
    "TotalsDocument",
    "VerifyDocument",
]


class ErrorDocument(TypedDict):
    """Any command that failed; its exit code is neither 0 nor 1."""

    schema: Literal["ckptcore.error/1"]
    error: str  #: name of the class in `ckptcore.errors`, or of another exception
    message: str
    exit_code: int


class AttributeKey(TypedDict):
    """The key of a field of an object, kept apart from a text key of a mapping."""

    attr: str


KeyDocument: TypeAlias = int | str | AttributeKey
"""A step of a path: an index or int key, a str key, an attribute."""


class LeafDocument(TypedDict):
    """An array, or a value that lives in the root."""

    path: str
    keys: list[KeyDocument]
    kind: str  #: ``array``, or what a leaf handler calls it: ``int``, ``str``, ``jax.key`` ...
    dtype: str | None  #: of an array; None for a value
    shape: list[int] | None  #: of an array; None for a value
    nbytes: int  #: of the elements; 0 for a value and for an array that shares those of another
    shares: str | None  #: the path of the array whose bytes this one shares
    notes: dict[str, JSON]  #: what the leaf handler noted, such as a sharding
    value: NotRequired[JSON]  #: of a value, in the encoding of the root


class ContainerDocument(TypedDict):
    """A container of the saved tree."""

    path: str
    keys: list[KeyDocument]
    kind: str  #: dict, OrderedDict, list, tuple or object
    type: str | None  #: qualified name of the type that was saved, where `kind` does not tell
    children: int


class ObjectDocument(TypedDict):
    """An object (file) of the checkpoint."""

    key: str
    size: int
    checksummed: bool


class TotalsDocument(TypedDict):
    """Sums over a checkpoint."""

    arrays: int
    values: int
    nbytes: int  #: of all arrays, shared ones counted once
    objects: int
    object_bytes: int


class InspectDocument(TypedDict):
    """``ckptcore inspect --json``."""

    schema: Literal["ckptcore.inspect/1"]
    location: str
    layout: str
    writer: str
    created: str | None
    save_id: str | None
    custom: dict[str, JSON]
    containers: list[ContainerDocument]
    leaves: list[LeafDocument]
    objects: list[ObjectDocument]
    totals: TotalsDocument


class ListedDocument(TypedDict):
    """Something in a directory: a checkpoint, or what is left of a save."""

    name: str
    state: Literal["committed", "foreign", "uncommitted", "leftover", "corrupt", "unreadable"]
    layout: str | None
    created: str | None
    arrays: int | None
    nbytes: int | None
    error: str | None  #: why it is corrupt or unreadable


class ListDocument(TypedDict):
    """``ckptcore ls --json``."""

    schema: Literal["ckptcore.ls/1"]
    directory: str
    checkpoints: list[ListedDocument]


class ProblemDocument(TypedDict):
    """Something that is wrong with a checkpoint."""

    object: str | None  #: the object (file)
    start: int | None  #: the first byte in it that is wrong, or None where it is the whole object
    stop: int | None  #: the byte behind the last
    arrays: list[str]  #: the paths of the arrays that have bytes there
    message: str  #: what was expected and found


class VerifyDocument(TypedDict):
    """``ckptcore verify --json``."""

    schema: Literal["ckptcore.verify/1"]
    location: str
    ok: bool
    objects: int  #: how many were checked
    nbytes: int  #: bytes checked
    unverified: list[str]  #: objects of which no checksums are kept
    problems: list[ProblemDocument]


class DifferenceDocument(TypedDict):
    """A way in which two checkpoints differ."""

    path: str
    keys: list[KeyDocument]
    kind: Literal["only_in_a", "only_in_b", "structure", "kind", "dtype", "shape", "values"]
    a: JSON
    b: JSON
    differing: NotRequired[int]  #: of "values" of arrays: elements that differ
    elements: NotRequired[int]  #: ... of how many
    max_absolute_error: NotRequired[
        float | str | None
    ]  #: "nan" where only one is; None of elements that are no numbers


class DiffDocument(TypedDict):
    """``ckptcore diff --json``."""

    schema: Literal["ckptcore.diff/1"]
    a: str
    b: str
    same: bool
    leaves_compared: int
    nbytes_compared: int  #: read from both
    differences: list[DifferenceDocument]


class ConvertDocument(TypedDict):
    """``ckptcore convert --json``."""

    schema: Literal["ckptcore.convert/1"]
    source: str
    destination: str
    layout: str
    arrays: int
    nbytes: int


class PluginDocument(TypedDict):
    """An installed plugin."""

    name: str
    distribution: str
    hooks: list[str]
    layouts: list[str]
    storages: list[str]


class FailedPluginDocument(TypedDict):
    """A plugin that is installed and could not be loaded."""

    name: str
    distribution: str
    reason: str


class PluginsDocument(TypedDict):
    """``ckptcore plugins --json``."""

    schema: Literal["ckptcore.plugins/1"]
    version: str
    plugins: list[PluginDocument]
    failed: list[FailedPluginDocument]
