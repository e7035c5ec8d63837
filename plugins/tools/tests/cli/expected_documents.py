"""Types of the JSON documents that ``--json`` prints.

``schema`` names the type and its version. Within a version members are only added; a reader should ignore those it does
not know. Sizes are in bytes, times ISO 8601 in UTC. Members of a leaf that represent containers, arrays and values are
those of `LeafDocument`; ``path`` is for people, ``keys`` for programs.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypeAlias, TypedDict

from ckptcore.model import JSON


class ErrorDocument(TypedDict):
    """Any command that failed; its exit code is neither 0 nor 1."""

    schema: Literal["ckptcore.error/1"]
    error: str  #: name of the class in `ckptcore.errors`, or of another exception
    message: str
    exit_code: int


class AttributeKey(TypedDict):
    """The key of an attribute, as opposed to a text key of a mapping."""

    attr: str


KeyDocument: TypeAlias = int | str | AttributeKey
"""A step of a path: an index or int key, a str key, an attribute."""


class StatisticsDocument(TypedDict):
    """Statistics of the elements of an array. Those of complex numbers are about their absolute values."""

    elements: int
    nan: int
    infinite: int
    zeros: int
    minimum: float | None  #: this and the following ones are of the finite elements; None if there are none
    maximum: float | None
    mean: float | None
    deviation: float | str | None  #: "inf" if a square is larger than every float64
    norm: float | str


class LeafDocument(TypedDict):
    """An array, or a value that is stored in the root."""

    path: str
    keys: list[KeyDocument]
    kind: str  #: ``array``, or what a leaf handler calls it: ``int``, ``str``, ``jax.key`` ...
    dtype: str | None  #: of an array; None for a value
    shape: list[int] | None  #: of an array; None for a value
    nbytes: int  #: of the elements; 0 for a value and for an array that shares those of another
    shares: str | None  #: the path of the array whose bytes this one shares
    notes: dict[str, JSON]  #: what the leaf handler noted, such as a sharding
    value: NotRequired[JSON]  #: of a value, in the encoding of the root
    statistics: NotRequired[StatisticsDocument]  #: with --statistics, of an array of numbers


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
    """Sums over a checkpoint. Arrays that share their bytes count once."""

    arrays: int
    values: int
    nbytes: int  #: of all arrays
    objects: int
    object_bytes: int


class EventDocument(TypedDict):
    """A phase of the save that wrote a checkpoint; see `ckptcore.events`."""

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
    leaves: list[LeafDocument]  #: with --filter, those that match
    objects: list[ObjectDocument]
    totals: TotalsDocument
    metrics: dict[str, float | str]  #: "nan", "inf", "-inf" where it is none that JSON has
    timeline: list[EventDocument]  #: empty where none was kept
    problems: list[ProblemDocument]  #: files that are missing or have another size
    bases: list[str]  #: the checkpoints that have arrays of it, relative to the directory that it is in
    left_out: NotRequired[list[str]]  #: as of `VerifyDocument`
    unused: NotRequired[dict[str, list[str]]]  #: of other software's, by object the arrays that its index leaves out


class CheckpointableDocument(TypedDict):
    """One of several checkpointables, as `InspectDocument` has one tree."""

    name: str
    kind: Literal["tree", "files"]
    processes: (
        int | None
    )  #: the number of processes with a state of their own, the first of which is shown; None: one state of all
    layout: str
    containers: list[ContainerDocument]  #: of files none
    leaves: list[LeafDocument]  #: of files none
    objects: list[ObjectDocument]
    totals: TotalsDocument
    unused: NotRequired[dict[str, list[str]]]  #: of other software's, by object the arrays that its index leaves out


class CheckpointablesDocument(TypedDict):
    """``ckptcore inspect --json`` of a checkpoint of several checkpointables."""

    schema: Literal["ckptcore.inspect_checkpointables/1"]
    location: str
    writer: str
    created: str | None  #: None where other software wrote it and does not say
    save_id: str | None  #: None where other software wrote it
    custom: dict[str, JSON]
    metrics: dict[str, float | str]
    checkpointables: list[CheckpointableDocument]
    deleted: list[str]  #: names of what was saved too and deleted since
    unreadable: NotRequired[dict[str, str]]  #: of other software's, by name why nothing that is installed reads it
    timeline: list[EventDocument]
    problems: list[ProblemDocument]  #: files that are missing or have another size


class ListedDocument(TypedDict):
    """An entry of a directory: a checkpoint, or a leftover of a save."""

    name: str
    state: Literal["committed", "foreign", "incomplete", "uncommitted", "leftover", "corrupt", "unreadable", "run"]
    steps: NotRequired[int]  #: of a run
    newest: NotRequired[int]  #: of a run: its newest step
    layout: str | None
    created: str | None
    arrays: int | None  #: shared ones counted once
    nbytes: int | None
    error: str | None  #: why it is incomplete, corrupt or unreadable
    writer: NotRequired[str]  #: the software that wrote it, where it can be read
    checkpointables: NotRequired[list[str]]  #: their names, where it holds several; `layout` is "composite" then
    problems: NotRequired[list[ProblemDocument]]  #: of an incomplete one: files that are missing or have another size


class ListDocument(TypedDict):
    """``ckptcore ls --json``."""

    schema: Literal["ckptcore.ls/1"]
    directory: str
    checkpoints: list[ListedDocument]


class ProblemDocument(TypedDict):
    """A problem of a checkpoint."""

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
    state: Literal["sound", "complete", "damaged"]  #: complete: all was read, but some bytes have no checksums
    objects: int  #: how many were checked
    nbytes: int  #: bytes checked
    unverified: list[str]  #: objects of which no checksums are kept
    deleted: list[str]  #: names of what was saved too and is not there: deleted since, or lost
    unused: dict[str, list[str]]  #: of other software's, by object the arrays that its index leaves out
    unsupported: list[str]  #: of other software's, the leaves that nothing that is installed reads
    unjudged: NotRequired[list[str]]  #: statements about what may be complete or not
    left_out: NotRequired[list[str]]  #: files with state, and tensors, next to other software's that are no part of it
    problems: list[ProblemDocument]


class WorstElementDocument(TypedDict):
    """An element that differs much."""

    index: list[int]
    a: float | int | str  #: text for a complex number, and for "nan", "inf" and "-inf"
    b: float | int | str
    error: float | str  #: the absolute difference


class DifferenceDocument(TypedDict):
    """A difference between two checkpoints."""

    path: str
    keys: list[KeyDocument]
    kind: Literal["only_in_a", "only_in_b", "structure", "kind", "dtype", "shape", "values", "size", "bytes"]
    checkpointable: NotRequired[str]  #: the directory of the one it is in, where there are several
    a: JSON
    b: JSON
    differing: NotRequired[int]  #: of "values" of arrays: elements that differ; of "bytes" of files: bytes
    elements: NotRequired[int]  #: ... of how many
    max_absolute_error: NotRequired[
        float | str | None
    ]  #: "nan" where only one is; None of elements that are no numbers
    norm: NotRequired[float | str | None]  #: the Euclidean norm of the difference
    worst: NotRequired[list[WorstElementDocument]]  #: up to ten elements with the largest errors, the worst first


class DiffDocument(TypedDict):
    """``ckptcore diff --json``."""

    schema: Literal["ckptcore.diff/1"]
    a: str
    b: str
    same: bool
    leaves_compared: int
    nbytes_compared: int  #: read from both
    files_compared: NotRequired[int]  #: where both have files that objects wrote
    differences: list[DifferenceDocument]


class CopiedDocument(TypedDict):
    """The result of a copy of a checkpoint."""

    objects: int  #: how many it has, its root included
    nbytes: int  #: bytes of all of them
    sent: int  #: bytes that were written at the destination
    kept: int  #: bytes that were there already
    read_back: int  #: bytes that were read at the destination
    requests: int  #: ranges read, pieces written, objects begun and completed
    unverified: list[str]  #: objects of which no checksums are kept


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
    copied: CopiedDocument | None  #: of one that is at the destination now
    error: str | None  #: of one that is damaged at the source, or cannot be read or written


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
    checkpointables: NotRequired[list[str]]  #: their names, where there are several


class ConsolidateDocument(TypedDict):
    """``ckptcore consolidate --json``."""

    schema: Literal["ckptcore.consolidate/1"]
    source: str
    destination: str
    subtree: str  #: the requested names; empty for all
    files: list[str]  #: of safetensors
    arrays: int
    nbytes: int


class OwnerDocument(TypedDict):
    """The job that writes steps into a directory."""

    alive: bool | None  #: None where that cannot be known at once
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
    nbytes: int | None  #: of its objects; of other software's, of its arrays
    metrics: dict[str, float | str]  #: "nan", "inf", "-inf" where it is none that JSON has
    pinned: bool | None  #: None where that cannot be found out
    error: str | None  #: why it is incomplete, corrupt or unreadable, or the first problem that verifying it found
    save_id: str | None
    seconds: float | None  #: from the start of the save to its commit
    blocked_seconds: float | None  #: ... during which the caller could not train
    sound: NotRequired[bool | None]  #: with --verify; None where it is unknown, as without checksums
    unverified: NotRequired[list[str]]  #: with --verify: objects of which no checksums are kept
    problems: NotRequired[list[ProblemDocument]]  #: of an incomplete step, and with --verify


class StepsDocument(TypedDict):
    """``ckptcore steps --json``."""

    schema: Literal["ckptcore.steps/1"]
    directory: str
    owner: OwnerDocument | None  #: None: no owner
    steps: list[StepDocument]  #: ascending
    older: int  #: how many more --last left out
    leftovers: list[str]  #: hidden directories of saves and deletions that run or failed


class GcStepDocument(TypedDict):
    """The decision about a step."""

    step: int
    name: str
    action: Literal["keep", "delete"]
    reasons: list[str]  #: why
    created: str | None
    metrics: dict[str, float | str]
    nbytes: int | None  #: of what is to be deleted


class GcDocument(TypedDict):
    """``ckptcore gc --json``."""

    schema: Literal["ckptcore.gc/1"]
    directory: str
    policy: str
    dry_run: bool
    steps: list[GcStepDocument]  #: ascending
    leftovers: list[str]  #: files of failed and of running saves and deletions; those of running ones stay
    deleted: list[int]  #: steps; of a dry run none


class PluginDocument(TypedDict):
    """An installed plugin."""

    name: str
    distribution: str
    hooks: list[str]
    layouts: list[str]
    storages: list[str]
    failed_layouts: NotRequired[dict[str, str]]  #: layouts that cannot be used, by name why not


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
