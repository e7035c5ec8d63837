"""Types of the JSON documents that ``--json`` prints.

``schema`` names the type and its version. Within a version, members are only added, so a reader should ignore unknown
members. Sizes are in bytes, and times are ISO 8601 in UTC. Descriptions of containers, arrays and values have the
members of `LeafDocument`. ``path`` is for people, and ``keys`` is for programs.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypeAlias, TypedDict

from ckptcore.model import JSON


class ErrorDocument(TypedDict):
    """The document of a failed command, whose exit code is neither 0 nor 1."""

    schema: Literal["ckptcore.error/1"]
    error: str  #: name of the class, in `ckptcore.errors` or of another exception
    message: str
    exit_code: int


class AttributeKey(TypedDict):
    """The key of an attribute, as opposed to a text key of a mapping."""

    attr: str


KeyDocument: TypeAlias = int | str | AttributeKey
"""A part of a path: an index, an int key, a str key or an attribute."""


class StatisticsDocument(TypedDict):
    """Statistics of the elements of an array. Complex numbers are counted by their absolute values."""

    elements: int
    nan: int
    infinite: int
    zeros: int
    minimum: float | None  #: from here on, statistics of the finite elements; None without finite elements
    maximum: float | None
    mean: float | None
    deviation: float | str | None  #: "inf" if a square is larger than every float64
    norm: float | str


class LeafDocument(TypedDict):
    """An array, or a value that is stored in the root."""

    path: str
    keys: list[KeyDocument]
    kind: str  #: ``array``, or the name that the leaf handler gives, such as ``int``, ``str`` or ``jax.key``
    dtype: str | None  #: None for a value
    shape: list[int] | None  #: None for a value
    nbytes: int  #: bytes of the elements; 0 for a value, and for an array that shares the bytes of another one
    shares: str | None  #: the path of the array whose bytes this one shares
    notes: dict[str, JSON]  #: notes of the leaf handler, such as a sharding
    value: NotRequired[JSON]  #: only for a value, in the encoding of the root
    statistics: NotRequired[StatisticsDocument]  #: only with --statistics, for an array of numbers


class ContainerDocument(TypedDict):
    """A container of the saved tree."""

    path: str
    keys: list[KeyDocument]
    kind: str  #: dict, OrderedDict, list, tuple or object
    type: str | None  #: qualified name of the saved type, if `kind` does not determine it
    children: int


class ObjectDocument(TypedDict):
    """An object (file) of the checkpoint."""

    key: str
    size: int
    checksummed: bool


class TotalsDocument(TypedDict):
    """Sums over a checkpoint. Arrays that share their bytes count once."""

    arrays: int
    values: int
    nbytes: int  #: of all arrays
    objects: int
    object_bytes: int


class EventDocument(TypedDict):
    """A phase of the save that wrote a checkpoint. See `ckptcore.events`."""

    phase: str
    rank: int
    began: float  #: seconds since the epoch, UTC
    seconds: float
    nbytes: int | None
    error: str | None


class InspectDocument(TypedDict):
    """``ckptcore inspect --json`` of a checkpoint that is one tree."""

    schema: Literal["ckptcore.inspect/1"]
    location: str
    layout: str
    writer: str
    created: str | None
    save_id: str | None
    custom: dict[str, JSON]
    containers: list[ContainerDocument]
    leaves: list[LeafDocument]  #: with --filter, only matching leaves
    objects: list[ObjectDocument]
    totals: TotalsDocument
    metrics: dict[str, float | str]  #: "nan", "inf" and "-inf" are text, because JSON lacks these numbers
    timeline: list[EventDocument]  #: empty if the checkpoint has no timeline
    problems: list[ProblemDocument]  #: files that are missing or have another size
    bases: list[str]  #: locations of its bases, relative to the directory that contains the checkpoint
    left_out: NotRequired[list[str]]  #: see `VerifyDocument`
    unused: NotRequired[dict[str, list[str]]]  #: see `VerifyDocument`


class CheckpointableDocument(TypedDict):
    """One of several checkpointables. Members of the same name are described in `InspectDocument`."""

    name: str
    kind: Literal["tree", "files"]
    processes: int | None  #: number of processes if each has its own state (the first state is shown), else None
    layout: str
    containers: list[ContainerDocument]  #: empty for files
    leaves: list[LeafDocument]  #: empty for files
    objects: list[ObjectDocument]
    totals: TotalsDocument
    unused: NotRequired[dict[str, list[str]]]  #: see `VerifyDocument`


class CheckpointablesDocument(TypedDict):
    """``ckptcore inspect --json`` of a checkpoint of several checkpointables."""

    schema: Literal["ckptcore.inspect_checkpointables/1"]
    location: str
    writer: str
    created: str | None  #: None if other software wrote the checkpoint without a time
    save_id: str | None  #: None if other software wrote the checkpoint
    custom: dict[str, JSON]
    metrics: dict[str, float | str]
    checkpointables: list[CheckpointableDocument]
    deleted: list[str]  #: names of checkpointables that were saved and later deleted
    unreadable: NotRequired[dict[str, str]]  #: other software's items that no installed plugin reads: name to reason
    timeline: list[EventDocument]
    problems: list[ProblemDocument]  #: files that are missing or have another size


class ListedDocument(TypedDict):
    """An entry of a directory: a checkpoint, or a leftover of a save."""

    name: str
    state: Literal["committed", "foreign", "incomplete", "uncommitted", "leftover", "corrupt", "unreadable", "run"]
    steps: NotRequired[int]  #: only for a run: the number of its steps
    newest: NotRequired[int]  #: only for a run: its newest step
    layout: str | None
    created: str | None
    arrays: int | None  #: arrays that share their bytes count once
    nbytes: int | None
    error: str | None  #: why the checkpoint is incomplete, corrupt or unreadable
    writer: NotRequired[str]  #: the software that wrote the checkpoint, if the root is readable
    checkpointables: NotRequired[list[str]]  #: names of several checkpointables; `layout` is then "composite"
    problems: NotRequired[list[ProblemDocument]]  #: if incomplete: files that are missing or have another size


class ListDocument(TypedDict):
    """``ckptcore ls --json``."""

    schema: Literal["ckptcore.ls/1"]
    directory: str
    checkpoints: list[ListedDocument]


class ProblemDocument(TypedDict):
    """A problem of a checkpoint."""

    object: str | None  #: the object (file)
    start: int | None  #: the first wrong byte of the object; None if the whole object is wrong
    stop: int | None  #: the end of the wrong bytes; the byte at `stop` is not included
    arrays: list[str]  #: the paths of the arrays that have bytes in this range
    message: str  #: the expected and the actual state


class VerifyDocument(TypedDict):
    """``ckptcore verify --json``."""

    schema: Literal["ckptcore.verify/1"]
    location: str
    ok: bool
    state: Literal["sound", "complete", "damaged"]  #: complete: no problem found, but some bytes have no checksums
    objects: int  #: number of checked objects
    nbytes: int  #: number of checked bytes
    unverified: list[str]  #: objects without checksums
    deleted: list[str]  #: names of checkpointables that were saved and no longer exist: deleted or lost
    unused: dict[str, list[str]]  #: other software's objects, with their arrays that the index omits
    unsupported: list[str]  #: other software's leaves that no installed plugin reads
    unjudged: NotRequired[list[str]]  #: descriptions of parts whose completeness cannot be determined
    left_out: NotRequired[list[str]]  #: files and tensors in the directory that other software's checkpoint omits
    problems: list[ProblemDocument]


class WorstElementDocument(TypedDict):
    """One of the elements with the largest differences."""

    index: list[int]
    a: float | int | str  #: complex numbers, "nan", "inf" and "-inf" are text
    b: float | int | str
    error: float | str  #: the absolute difference


class DifferenceDocument(TypedDict):
    """A difference between two checkpoints."""

    path: str
    keys: list[KeyDocument]
    kind: Literal["only_in_a", "only_in_b", "structure", "kind", "dtype", "shape", "values", "size", "bytes"]
    checkpointable: NotRequired[str]  #: directory of the checkpointable, if the checkpoint has several
    a: JSON
    b: JSON
    differing: NotRequired[int]  #: number of elements that differ, or of bytes for the kind "bytes"
    elements: NotRequired[int]  #: number of compared elements or bytes
    #: "nan" if only one of the elements is NaN; None for elements that are not numbers
    max_absolute_error: NotRequired[float | str | None]
    norm: NotRequired[float | str | None]  #: the Euclidean norm of the difference
    worst: NotRequired[list[WorstElementDocument]]  #: up to ten elements, the largest error first


class DiffDocument(TypedDict):
    """``ckptcore diff --json``."""

    schema: Literal["ckptcore.diff/1"]
    a: str
    b: str
    same: bool
    leaves_compared: int
    nbytes_compared: int  #: number of bytes read from both checkpoints
    files_compared: NotRequired[int]  #: only if both checkpoints have files that objects wrote
    differences: list[DifferenceDocument]


class CopiedDocument(TypedDict):
    """The result of a copy of a checkpoint."""

    objects: int  #: number of objects, including the root
    nbytes: int  #: bytes of all objects
    sent: int  #: bytes written at the destination
    kept: int  #: bytes that the destination already had
    read_back: int  #: bytes read at the destination
    requests: int  #: number of reads of ranges, writes of pieces, and starts and ends of objects
    unverified: list[str]  #: objects without checksums


class CopyDocument(TypedDict):
    """``ckptcore copy --json`` of a checkpoint."""

    schema: Literal["ckptcore.copy/1"]
    source: str
    destination: str
    copied: CopiedDocument


class CopiedStepDocument(TypedDict):
    """The result of a copy of a step."""

    step: int
    state: Literal["copied", "left", "gone", "damaged", "failed"]
    copied: CopiedDocument | None  #: None if the step is not at the destination
    error: str | None  #: why the step was not copied: damage, or a failed read or write


class CopyStepsDocument(TypedDict):
    """``ckptcore copy --json`` of a directory of steps."""

    schema: Literal["ckptcore.copy_steps/1"]
    source: str
    destination: str
    steps: list[CopiedStepDocument]  #: ascending
    left_out: NotRequired[list[str]]  #: files next to the steps that were not copied


class ConvertDocument(TypedDict):
    """``ckptcore convert --json``."""

    schema: Literal["ckptcore.convert/1"]
    source: str
    destination: str
    layout: str
    arrays: int
    nbytes: int
    checkpointables: NotRequired[list[str]]  #: names, if the checkpoint has several checkpointables


class ConsolidateDocument(TypedDict):
    """``ckptcore consolidate --json``."""

    schema: Literal["ckptcore.consolidate/1"]
    source: str
    destination: str
    subtree: str  #: the requested names; empty for all
    files: list[str]  #: names of the safetensors files
    arrays: int
    nbytes: int


class OwnerDocument(TypedDict):
    """The job that writes steps into a directory."""

    alive: bool | None  #: None if it cannot be determined without waiting
    host: str | None
    pid: int | None
    since: str | None
    description: str


class StepDocument(TypedDict):
    """The state of a step."""

    step: int
    name: str
    state: Literal["committed", "foreign", "incomplete", "uncommitted", "corrupt", "unreadable", "other"]
    created: str | None
    nbytes: int | None  #: bytes of the objects; for other software's checkpoints, bytes of the arrays
    metrics: dict[str, float | str]  #: see `InspectDocument`
    pinned: bool | None  #: None if unknown
    error: str | None  #: why the step is incomplete, corrupt or unreadable, or the first problem of a verification
    save_id: str | None
    seconds: float | None  #: from the start of the save to its commit
    blocked_seconds: float | None  #: time during which the save blocked the caller
    sound: NotRequired[bool | None]  #: only with --verify; None if unknown, for example without checksums
    unverified: NotRequired[list[str]]  #: only with --verify: objects without checksums
    problems: NotRequired[list[ProblemDocument]]  #: only for an incomplete step, or with --verify


class StepsDocument(TypedDict):
    """``ckptcore steps --json``."""

    schema: Literal["ckptcore.steps/1"]
    directory: str
    owner: OwnerDocument | None  #: None without an owner
    near: str | None  #: the near directory of the run, which may have newer steps; None without one
    steps: list[StepDocument]  #: in ascending order
    older: int  #: number of older steps that --last omits
    leftovers: list[str]  #: hidden directories of saves and deletions that are running or failed


class GcStepDocument(TypedDict):
    """The decision about a step."""

    step: int
    name: str
    action: Literal["keep", "delete"]
    reasons: list[str]
    created: str | None
    metrics: dict[str, float | str]
    nbytes: int | None  #: bytes of the files to delete


class GcDocument(TypedDict):
    """``ckptcore gc --json``."""

    schema: Literal["ckptcore.gc/1"]
    directory: str
    policy: str
    dry_run: bool
    steps: list[GcStepDocument]  #: in ascending order
    leftovers: list[str]  #: files of failed and running saves and deletions; files of running ones are kept
    deleted: list[int]  #: deleted steps; empty in a dry run


class PluginDocument(TypedDict):
    """An installed plugin."""

    name: str
    distribution: str
    hooks: list[str]
    layouts: list[str]
    storages: list[str]
    failed_layouts: NotRequired[dict[str, str]]  #: layouts that cannot be used: name to reason


class FailedPluginDocument(TypedDict):
    """An installed plugin that failed to load."""

    name: str
    distribution: str
    reason: str


class PluginsDocument(TypedDict):
    """``ckptcore plugins --json``."""

    schema: Literal["ckptcore.plugins/1"]
    version: str
    plugins: list[PluginDocument]
    failed: list[FailedPluginDocument]
