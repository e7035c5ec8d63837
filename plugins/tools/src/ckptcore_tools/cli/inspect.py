"""``ckptcore inspect``: shows the content of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import click

import ckptcore
from ckptcore.events import Event
from ckptcore.model import (
    ArrayRecord,
    LeafRecord,
    Node,
    Skeleton,
    TreeMetadata,
    TreePath,
    column_summary,
    column_value,
    float_to_json,
    format_path,
)
from ckptcore.results import CheckpointMetadata, Problem
from ckptcore_tools.cli.command import ExitCode, checkpoint_command, command_context
from ckptcore_tools.cli.output import (
    UNSET,
    byte_progress,
    print_document,
    print_line,
    print_lines,
    printable,
    terminal_width,
)
from ckptcore_tools.cli.treeview import format_lines, tree_lines
from ckptcore_tools.cli.verify import print_unused, problem_documents
from ckptcore_tools.copies.foreign_files import in_directory_of
from ckptcore_tools.elements import are_numbers
from ckptcore_tools.formatting import format_count, format_layout, format_metrics, format_problems, format_size
from ckptcore_tools.locations import child_location, describe_and_check, first_directories
from ckptcore_tools.outline import Outline, count_arrays, leaf_filter, outline_of
from ckptcore_tools.statistics import ArrayStatistics, read_statistics
from ckptcore_tools.timelines import format_timeline

_STATISTICS: Final = (
    "elements", "nan", "infinite", "zeros", "minimum", "maximum", "mean", "deviation", "norm",
)  # fmt: skip
"""Statistics of an array in the JSON document."""

_EVENT_FIELDS = ("phase", "rank", "began", "seconds", "nbytes", "error")
"""Fields of an event in the JSON document."""


@checkpoint_command("inspect", "Show the content of a checkpoint.")
@click.argument("location")
@click.option("--depth", type=click.IntRange(min=0), help="Levels of the tree to show. Default: all.")
@click.option(
    "--filter",
    "pattern",
    metavar="PATTERN",
    help="Show only leaves whose path contains this text, or matches this pattern if it has *, ? or [. A path is the "
    "keys joined by /, such as params/dense/kernel. * matches any text within a key, ** any number of keys.",
)
@click.option(
    "--statistics",
    "show_statistics",
    is_flag=True,
    help="Read the arrays that are shown, and show minimum, maximum, mean, standard deviation and norm of their finite "
    "elements, and how many elements are NaN, infinite or 0.",
)
@click.option("--objects", "show_objects", is_flag=True, help="Also list the objects (files).")
@click.option(
    "--timeline", "show_timeline", is_flag=True, help="Show the phases of the save and their times, not the tree."
)
def command(
    as_json: bool,
    location: str,
    depth: int | None,
    pattern: str | None,
    show_statistics: bool,
    show_objects: bool,
    show_timeline: bool,
) -> ExitCode:
    """Show the tree of a checkpoint (shapes, dtypes, shardings, sizes) and the software that wrote it.

    Each container is shown with its arrays, parameters (elements) and bytes. Names with dots are shown as a tree. In a
    checkpoint of several checkpointables, each one is shown with its tree or its files. Without --statistics, no array
    is read. --depth, --objects and --timeline apply to text only. With --filter, JSON contains only the leaves that
    match, but all containers and objects, and the totals of the whole checkpoint.
    """
    try:
        choose = leaf_filter(pattern or "")
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--filter") from error
    checkpoint, files = describe_and_check(location, command_context())
    directories = first_directories(location, command_context()) if checkpoint.is_composite else {}
    trees = {name: metadata.tree for name, metadata in _parts(checkpoint).items() if not metadata.is_files}
    locations = {name: child_location(location, directories.get(name, name)) if name else location for name in trees}
    chosen = {name: choose(tree) for name, tree in trees.items()}
    if as_json:
        statistics = _read_statistics(locations, trees, chosen) if show_statistics else {}
        left_out, others = in_directory_of(location, command_context())
        _print_document(location, checkpoint, files.problems, left_out, others, chosen, statistics)
        return ExitCode.OK
    drawings: dict[str, _Drawing] = {}
    if not show_timeline:
        outlines = {name: outline_of(tree) for name, tree in trees.items()}
        if pattern is not None:
            outlines = {name: outline.only(frozenset(chosen[name])) for name, outline in outlines.items()}
        shown = {name: [outline.leaves[row] for row in outline.rows(depth)] for name, outline in outlines.items()}
        statistics = _read_statistics(locations, trees, shown) if show_statistics else {}
        drawings = {
            name: _Drawing(outline if pattern is None or chosen[name] else None, depth, statistics.get(name, {}))
            for name, outline in outlines.items()
        }
    _print_summary(location, checkpoint)
    left_out, others = in_directory_of(location, command_context())
    for name in left_out:
        print_line((f"  {'left out':<11}", "yellow"), printable(name), ": no part of the checkpoint")
    for name in others:
        text = ": weights in another format, which copies leave out; load it by its own location"
        print_line((f"  {'also here':<11}", "dim"), printable(name), text)
    if files.problems:
        text = f"{format_problems(files.problems)}. Run `ckptcore verify {location}` to check every byte"
        print_line((f"  {'damaged':<11}", "bold red"), printable(text))
    print_line()
    if show_timeline:
        _print_timeline(checkpoint.timeline)
    elif not checkpoint.is_composite:
        _print_content(checkpoint, drawings.get(""), show_objects)
    else:
        for number, (name, metadata) in enumerate(checkpoint.checkpointables.items()):
            if number:
                print_line()
            text = _checkpointable_text(checkpoint, name, directories.get(name, name))
            print_line((printable(name), "bold"), "  ", (text, "dim"))
            _print_content(metadata, drawings.get(name), show_objects)
        for name, reason in checkpoint.checkpointables.unreadable.items():
            print_line((printable(name), "bold"), "  ", ("cannot be read", "yellow"), f": {printable(reason)}")
    return ExitCode.OK


def _parts(checkpoint: CheckpointMetadata) -> Mapping[str, CheckpointMetadata]:
    """Return each checkpointable by name. A checkpoint that is one tree has the name ""."""
    return checkpoint.checkpointables if checkpoint.is_composite else {"": checkpoint}


def _read_statistics(
    locations: Mapping[str, str], trees: Mapping[str, TreeMetadata], leaves: Mapping[str, Iterable[int]]
) -> Mapping[str, Mapping[int, ArrayStatistics | None]]:
    """Read the statistics of the numeric arrays among some leaves of each checkpointable. Skip all other leaves."""
    arrays = {
        name: [leaf for leaf in leaves[name] if leaf >= 0 and _has_numbers(tree.leaves[leaf])]
        for name, tree in trees.items()
    }
    total = sum(
        record.spec.nbytes
        for name, tree in trees.items()
        for leaf in {tree.aliases.get(leaf, leaf) for leaf in arrays[name]}
        if isinstance(record := tree.leaves[leaf], ArrayRecord)
    )
    by_leaf: dict[str, Mapping[int, ArrayStatistics | None]] = {}
    done = 0
    with byte_progress("reading") as progress:

        def add_progress(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            progress(done, total)

        for name, tree in trees.items():
            with ckptcore.open(locations[name], context=command_context()) as checkpoint:
                by_path = read_statistics(checkpoint, [tree.paths[leaf] for leaf in arrays[name]], add_progress)
            by_leaf[name] = {leaf: by_path.get(tree.paths[leaf]) for leaf in arrays[name]}
    return by_leaf


def _has_numbers(record: LeafRecord) -> bool:
    return isinstance(record, ArrayRecord) and are_numbers(record.spec.numpy_dtype)


def _print_document(
    location: str,
    checkpoint: CheckpointMetadata,
    problems: Sequence[Problem],
    left_out: Sequence[str],
    other_weights: Sequence[str],
    chosen: Mapping[str, Sequence[int]],
    statistics: Mapping[str, Mapping[int, ArrayStatistics | None]],
) -> None:
    members: dict[str, object] = {
        "location": location,
        "writer": checkpoint.writer,
        "created": checkpoint.created,
        "save_id": checkpoint.save_id,
        "custom": checkpoint.custom,
        "metrics": checkpoint.metrics,
        "timeline": [{name: getattr(event, name) for name in _EVENT_FIELDS} for event in checkpoint.timeline],
        "problems": problem_documents(problems),
        "left_out": left_out or UNSET,
        "other_weights": other_weights or UNSET,
    }
    contents = {
        name: _content_document(metadata, chosen.get(name, ()), statistics.get(name, {}))
        for name, metadata in _parts(checkpoint).items()
    }
    if not checkpoint.is_composite:
        print_document("inspect", **members, **contents[""], bases=checkpoint.bases)
        return
    checkpointables = [
        {
            "name": name,
            "kind": "files" if metadata.is_files else "tree",
            "processes": checkpoint.checkpointables.processes.get(name),
            **contents[name],
        }
        for name, metadata in checkpoint.checkpointables.items()
    ]
    print_document(
        "inspect_checkpointables",
        **members,
        checkpointables=checkpointables,
        deleted=checkpoint.checkpointables.deleted,
        unreadable=checkpoint.checkpointables.unreadable or UNSET,
    )


def _content_document(
    checkpoint: CheckpointMetadata, leaves: Sequence[int], statistics: Mapping[int, ArrayStatistics | None]
) -> dict[str, object]:
    """Return one tree, or the files of one object, as JSON. Files have no containers and no leaves."""
    return {
        "layout": checkpoint.layout,
        "containers": list(_container_documents(checkpoint.tree.skeleton, ())),
        "leaves": [_leaf_document(checkpoint.tree, leaf, statistics) for leaf in leaves],
        "objects": [
            {"key": record.key, "size": record.size, "checksummed": bool(record.checksums)}
            for record in checkpoint.objects.values()
        ],
        "unused": checkpoint.unused or UNSET,
        "totals": _totals(checkpoint),
    }


def _totals(checkpoint: CheckpointMetadata) -> dict[str, int]:
    return {
        "arrays": count_arrays(checkpoint.tree),
        "values": sum(not isinstance(record, ArrayRecord) for record in checkpoint.tree.leaves),
        "nbytes": checkpoint.tree.nbytes,
        "objects": len(checkpoint.objects),
        "object_bytes": sum(record.size for record in checkpoint.objects.values()),
    }


def _container_documents(node: Skeleton, path: TreePath) -> Iterator[dict[str, object]]:
    if not isinstance(node, Node):
        return
    yield {
        "path": format_path(path),
        "keys": path,
        "kind": node.kind,
        "type": node.type,
        "children": len(node.children),
    }
    for key, child in zip(node.keys, node.children, strict=True):
        yield from _container_documents(child, (*path, key))


def _leaf_document(
    tree: TreeMetadata, leaf: int, statistics: Mapping[int, ArrayStatistics | None]
) -> dict[str, object]:
    path, record, target = tree.paths[leaf], tree.leaves[leaf], tree.aliases.get(leaf)
    array = record if isinstance(record, ArrayRecord) else None
    document: dict[str, object] = {
        "path": format_path(path),
        "keys": path,
        "kind": record.kind,
        "dtype": array.spec.dtype if array else None,
        "shape": array.spec.shape if array else None,
        "nbytes": array.spec.nbytes if array and target is None else 0,
        "shares": None if target is None else format_path(tree.paths[target]),
        "notes": array.notes if array else {},
    }
    if not isinstance(record, ArrayRecord):
        is_column = column_summary(record) is not None
        document["value"] = _finite(column_value(record)) if is_column else record.value
    numbers = statistics.get(leaf)
    if numbers is not None:
        document["statistics"] = {name: getattr(numbers, name) for name in _STATISTICS}
    return document


def _finite(value: object) -> object:
    """Return the values of a column for JSON, which cannot represent infinity and NaN."""
    if isinstance(value, dict):
        return {str(key): _finite(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(child) for child in value]
    return float_to_json(value) if isinstance(value, float) else value


def _print_summary(location: str, checkpoint: CheckpointMetadata) -> None:
    layout, deleted, bases = None, None, None
    if not checkpoint.is_composite:
        layout, content = _layout_text(checkpoint), _content_text(checkpoint)
        layout = None if layout == checkpoint.writer else layout  # shown on the next line
        bases = ", ".join(checkpoint.bases)
    else:
        content = (
            f"{format_count(len(checkpoint.checkpointables), 'checkpointable')} of {format_size(checkpoint.nbytes)}"
        )
        deleted = ", ".join(checkpoint.checkpointables.deleted)
    print_line((printable(location), "bold"))
    for title, text in (
        ("layout", layout),
        ("written by", checkpoint.writer),
        ("created", checkpoint.created),
        ("save id", checkpoint.save_id),
        ("content", content),
        ("bases", bases),
        ("deleted", deleted),
        ("metrics", format_metrics(checkpoint.metrics)),
        ("custom", json.dumps(dict(checkpoint.custom), ensure_ascii=False) if checkpoint.custom else None),
    ):
        if text:
            print_line((f"  {title:<11}", "dim"), printable(text))


def _content_text(checkpoint: CheckpointMetadata) -> str:
    totals = _totals(checkpoint)
    if checkpoint.is_files:
        return f"{format_count(totals['objects'], 'file')} of {format_size(totals['object_bytes'])}"
    parts = []
    if totals["arrays"] or not totals["values"]:
        parts.append(f"{format_count(totals['arrays'], 'array')} of {format_size(totals['nbytes'])}")
    if totals["values"]:
        parts.append(format_count(totals["values"], "value"))
    if totals["objects"]:
        parts.append(f"in {format_count(totals['objects'], 'object')} of {format_size(totals['object_bytes'])}")
    return ", ".join(parts)


def _layout_text(checkpoint: CheckpointMetadata) -> str:
    return format_layout(checkpoint.layout, checkpoint.tree, checkpoint.writer if checkpoint.save_id is None else None)


def _checkpointable_text(checkpoint: CheckpointMetadata, name: str, directory: str) -> str:
    """Return the summary of one of several checkpointables. `directory` contains the shown tree or files."""
    metadata = checkpoint.checkpointables[name]
    text = (
        _content_text(metadata)
        if metadata.is_files
        else f"{printable(_layout_text(metadata))}, {_content_text(metadata)}"
    )
    processes = checkpoint.checkpointables.processes.get(name)
    if processes is None or processes == 1:
        return text
    return f"{text}; saved by {processes:,} processes separately, showing {printable(directory)}"


def _print_timeline(timeline: Sequence[Event]) -> None:
    if not timeline:
        print_line(
            "no timeline: checkpoints of other software and of older versions have none, and for several "
            "checkpointables there is only one, of the whole checkpoint"
        )
        return
    for line in format_timeline(timeline).splitlines():
        print_line(line)


class _Drawing(NamedTuple):
    """The part of a tree that is shown.

    Attributes:
        outline: its rows; None if no leaf matches the option ``--filter``.
        depth: the option ``--depth``.
        statistics: statistics by leaf.
    """

    outline: Outline | None
    depth: int | None
    statistics: Mapping[int, ArrayStatistics | None]


def _print_content(checkpoint: CheckpointMetadata, drawing: _Drawing | None, show_objects: bool) -> None:
    """Print the tree, or the files of a checkpoint without a tree."""
    if drawing is not None:
        outline, depth, statistics = drawing
        if outline is None:
            print_line("no leaf matches the filter")
        else:
            print_lines(format_lines(tree_lines(checkpoint.tree, outline, depth, statistics.get), terminal_width()))
        print_unused(checkpoint.unused)
        if show_objects:
            print_line()
    if show_objects or drawing is None:
        for record in checkpoint.objects.values():
            print_line(f"{format_size(record.size):>9}  ", printable(record.key))
