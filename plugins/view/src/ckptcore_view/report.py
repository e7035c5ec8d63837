"""Reports: the page and its documents in one HTML file that needs no server and no network."""

from __future__ import annotations

import base64
import datetime
import gzip
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from ckptcore_tools.outline import leaf_filter
from ckptcore_tools.policy_text import parse_preservation

from ckptcore.commit.location import LocationLike
from ckptcore.commit.root import ROOT_KEY
from ckptcore.context import Context, default_context
from ckptcore.errors import CheckpointError, CheckpointNotFoundError
from ckptcore.installed import version_of
from ckptcore.model import ArrayRecord, TreeMetadata, format_path
from ckptcore.plain_safetensors import replace_file
from ckptcore.redaction import redacted
from ckptcore.step_names import StepNames
from ckptcore_view.assets import MODULES, import_map, page_file, page_html
from ckptcore_view.documents import BadRequestError, Document, Request, document_of
from ckptcore_view.open_tree import OpenTree
from ckptcore_view.viewed import OTHER, Viewed

_READ_BYTES: Final = 1_000_000_000
"""If the caller does not choose arrays, a report reads all arrays only if they have at most this many bytes."""

_MAX_ARRAYS: Final = 2_000
"""Limit of the arrays of one tree that a report describes, unless the caller chooses arrays."""

_MAX_ROWS: Final = 20_000
"""Limit of the total number of rows of trees and of chunks in older steps. The newest step is always complete."""

_LIMIT: Final = f"the report has the trees of its newest steps, up to {_MAX_ROWS:,} rows and chunks in all"

_NONCE: Final = "report"
_POLICY: Final = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline' data:; "
    "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'\">"
)
"""Content security policy. Nothing is loaded from the network. Modules in one file need ``data:`` URLs as addresses."""


def write_report(
    path: str | os.PathLike[str],
    location: LocationLike,
    *,
    arrays: Sequence[str] | None = None,
    compare: LocationLike | None = None,
    policy: str = "",
    step_names: StepNames | None = None,
    context: Context | None = None,
) -> None:
    """Write a report of a checkpoint or run to an HTML file, atomically.

    The report of a run has the newest 200 steps, the checkpoint of the newest step, the trees of older steps up to a
    total of 20,000 rows and chunks, and the norms of the chosen arrays over these steps. It names this host and the
    time.

    Args:
        path: the file.
        location: a path or URL of a checkpoint or run.
        arrays: patterns of the paths of the arrays to read for statistics, norms and differences. A pattern is a part
            of a path, or has wildcards as for `ckptcore.select.glob`. None: the first 2,000 arrays of each tree, or no
            arrays if more than 1 GB would be read for all trees, all steps and the other checkpoint together.
        compare: a checkpoint to compare with.
        policy: the text of a preservation policy; the report of a run shows what it keeps.
        step_names: the names of steps; None for the usual names.
        context: options.

    Raises:
        CheckpointNotFoundError: there is neither a checkpoint nor a run, or no array matches a pattern.
        CheckpointError: the checkpoint cannot be read.
        ValueError: a pattern or the policy is not valid, there is a policy but no run, the directory of the file does
            not exist, the file would be in the checkpoint, or its name is that of another format.
    """
    if isinstance(arrays, str):
        raise TypeError(f"arrays={arrays!r}: expected a sequence of patterns, such as [{arrays!r}]")
    if policy:
        parse_preservation(policy)
    filters = None if arrays is None else {pattern: leaf_filter(pattern) for pattern in arrays}
    other = "" if compare is None else str(compare)
    context = context or default_context()
    viewed = Viewed(str(location), context, other=other, policy=policy, step_names=step_names)
    if reason := viewed.policy_error or _target_error(path, viewed):
        raise BadRequestError(reason)
    replace_file(path, [_report_html(viewed, filters).encode()], context=context)


def _target_error(path: str | os.PathLike[str], viewed: Viewed) -> str:
    """Return the reason why the file cannot be written; empty if it can. Reads nothing of the checkpoint."""
    directory = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(directory):
        return f"the directory of the report does not exist: create {directory}"
    location = os.path.realpath(viewed.location.removeprefix("file://"))
    is_inside = viewed.kind not in ("run", "runs") and f"{os.path.realpath(path)}/".startswith(f"{location}/")
    if is_inside or os.path.lexists(os.path.join(directory, ROOT_KEY)):
        return f"the report {os.fspath(path)} would be in a checkpoint: write it elsewhere"
    name, suffix = os.path.splitext(path)
    if suffix.lower() in (".pdf", ".png", ".svg", ".json", ".md", ".txt"):
        return f"{os.fspath(path)}: a report is one HTML file: name it {name}.html. A browser prints it as PDF"
    return ""


_Filters: TypeAlias = Mapping[str, Callable[[TreeMetadata], Sequence[int]]]
"""Functions that choose the leaves of a tree, by their patterns."""


def _report_html(viewed: Viewed, filters: _Filters | None) -> str:
    """Return the HTML of a report."""
    documents = _Collector(viewed, filters).collect()
    addresses = {name: f"data:text/javascript;base64,{_base64(page_file(f'{name}.js').encode())}" for name in MODULES}
    data = _element("documents", json.dumps(documents))
    return page_html(
        imports=import_map(addresses),
        style=f"<style>{page_file('style.css')}</style>",
        data=data,
        nonce=_NONCE,
        policy=_POLICY,
    )


def _element(name: str, text: str) -> str:
    """Return an element with compressed text. In base64, no text can end the element early."""
    return f'<script type="text/plain" id="{name}">{_base64(gzip.compress(text.encode(), mtime=0))}</script>\n'


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


class _Collector:
    """Collects the documents that the page of a report can show."""

    def __init__(self, viewed: Viewed, filters: _Filters | None) -> None:
        self._viewed = viewed
        self._filters = filters
        self._unmatched = set(filters or ())
        self._documents: dict[str, Document] = {}
        self._versions: dict[str, str] = {}
        self._rows_left = _MAX_ROWS
        self._read_paths: dict[tuple[str, str], tuple[str, int]] = {}
        """Place and number of each array that was read. A key is the place within the step, and the array's path."""

    def collect(self) -> Mapping[str, Document]:
        """Return the documents by name and parameters, as the page requests them."""
        self._documents["view"] = {**self._add("view"), "report": _origin()}
        if self._viewed.kind == "runs":
            self._add_runs()
        elif self._viewed.kind == "run":
            self._add_run("")
        else:
            self._add_checkpoint("", ())
        if self._unmatched:
            patterns = ", ".join(map(repr, sorted(self._unmatched)))
            raise CheckpointNotFoundError(f"{self._viewed.location} has no array that matches {patterns}")
        return self._documents

    def _add_runs(self) -> None:
        """Add a folder of runs, and each run and checkpoint.

        If the caller chose no arrays, the arrays of runs are not read, because all runs together may have many.
        """
        runs = self._add("runs", **self._policy)
        self._documents[_key("runs")] = runs
        for run in runs["runs"]:
            if run["kind"] == "checkpoint":
                self._add_checkpoint(run["name"], ())
            elif "steps" in run:
                self._add_run(run["name"])

    @property
    def _policy(self) -> Mapping[str, str]:
        return {"policy": self._viewed.policy} if self._viewed.policy else {}

    def _add_run(self, place: str) -> None:
        of = {"at": place} if place else {}
        run = self._add("run", **of, **self._policy)
        self._documents[_key("run", **of)] = run
        steps: Any = run["steps"]
        names = [step["name"] for step in steps if step["state"] in ("committed", "foreign")]
        loadable = [f"{place}/{name}" if place else name for name in names]
        if loadable:
            self._add_checkpoint(loadable[-1], loadable)
        self._rows_left = _MAX_ROWS
        for step in reversed(loadable[:-1]):
            if self._rows_left > 0:
                self._add_older(step)

    def _add_older(self, place: str) -> None:
        """Add an older step. Reads no array, because `_add_tree` reads the arrays of all steps for their norms."""
        checkpoint = self._add("checkpoint", at=place)
        for item in checkpoint.get("checkpointables", ()):
            for directory in item["places"][:1]:
                self._add_older(f"{place}/{directory}")
        if checkpoint["kind"] != "tree":
            return
        tree = self._add("tree", at=place)
        self._versions[place] = tree.get("version", "")
        self._rows_left -= len(tree.get("leaves", ()))
        for row, leaf in enumerate(tree.get("leaves", ())):
            if leaf < 0 or str(row) in tree["values"] or self._rows_left < 0:
                continue
            array = self._add("array", at=place, leaf=leaf)
            self._rows_left -= len(array.get("chunks", {}).get("chunks", ()))
            if of := self._read_paths.get((_inside(place, self._viewed), array.get("path", ""))):
                read = _key("statistics", at=place, leaf=of[1], of=of[0])
                self._documents[_key("statistics", at=place, leaf=leaf)] = {"same": read}

    def _add(self, name: str, **parameters: str | int) -> Mapping[str, Any]:
        """Add a document. An error is added as a document, which the page shows.

        Raises:
            CheckpointError, BadRequestError: the document is the view, a run, the folder of runs, or a checkpoint.
        """
        document: Document
        texts = {key: str(value) for key, value in parameters.items()}
        if "leaf" in parameters and (version := self._versions.get(texts.get("of", texts["at"]))):
            texts["version"] = version
        try:
            document = document_of(self._viewed, name, Request(texts))
        except (CheckpointError, BadRequestError) as error:
            if name in ("view", "run", "runs", "checkpoint"):
                raise
            document = {"error": redacted(str(error))}
        self._documents[_key(name, **parameters)] = document
        return document

    def _add_checkpoint(self, place: str, steps: Sequence[str], *, reads_all: bool = True) -> None:
        """Add a checkpoint and the checkpointables in it. `reads_all`: read all arrays if none are chosen."""
        checkpoint = self._add("checkpoint", at=place)
        if checkpoint["kind"] == "tree":
            self._add_tree(place, steps, reads_all=reads_all)
            return
        parts = checkpoint.get("checkpointables", ())
        nbytes = sum(part["nbytes"] for part in parts if part["kind"] == "tree")
        reads_all = nbytes * self._times(steps) <= _READ_BYTES
        for part in parts:
            for directory in part["places"][:1]:
                self._add_checkpoint(f"{place}/{directory}" if place else directory, steps, reads_all=reads_all)

    def _times(self, steps: Sequence[str]) -> int:
        """Return the number of checkpoints to read."""
        return max(1, len(steps)) + bool(self._viewed.other)

    def _add_tree(self, place: str, steps: Sequence[str], *, reads_all: bool) -> None:
        tree = self._add("tree", at=place)
        self._versions[place] = tree.get("version", "")
        times = self._times(steps)
        described, read = self._viewed.read(place, lambda open_tree: self._choose(open_tree, times, reads_all))
        opened_paths = self._viewed.read(place, lambda open_tree: open_tree.tree.paths)
        for leaf in described:
            self._add("array", at=place, leaf=leaf)
        for leaf in read:
            self._add("statistics", at=place, leaf=leaf)
            self._add("elements", at=place, leaf=leaf)
            self._read_paths[_inside(place, self._viewed), format_path(opened_paths[leaf])] = place, leaf
        inside = _inside(place, self._viewed)
        if self._viewed.other:
            self._add_differences(place, f"{OTHER}{inside if self._viewed.other_has_parts else ''}", read)
        elif len(steps) > 1:
            self._add_differences(place, f"{steps[-2]}{inside}", read)
        for name in steps:
            for leaf in read:
                self._add("statistics", at=f"{name}{inside}", leaf=leaf, of=place)

    def _add_differences(self, place: str, other: str, read: Sequence[int]) -> None:
        document = self._add("differences", at=place, other=other)
        in_both = {pair["leaf"] for pair in document.get("pairs", ())}
        for leaf in read:
            if leaf in in_both:
                self._add("difference", at=place, other=other, leaf=leaf)

    def _choose(self, open_tree: OpenTree, times: int, reads_all: bool) -> tuple[Sequence[int], Sequence[int]]:
        """Return the arrays to describe, and the arrays to read. `times`: number of checkpoints that are read."""
        tree = open_tree.tree
        arrays = [leaf for leaf, record in enumerate(tree.leaves) if isinstance(record, ArrayRecord)]
        if self._filters is None:
            reads_all &= self._viewed.kind != "runs" and tree.nbytes * times <= _READ_BYTES
            return arrays[:_MAX_ARRAYS], arrays[:_MAX_ARRAYS] if reads_all else ()
        chosen: set[int] = set()
        for pattern, choose in self._filters.items():
            if matching := set(choose(tree)).intersection(arrays):
                self._unmatched.discard(pattern)
                chosen |= matching
        return sorted(chosen), sorted(chosen)


def _inside(place: str, viewed: Viewed) -> str:
    """Return the part of a place within its step, with a slash before it. Without a run, return the whole place."""
    names = place.split("/") if place else []
    above = {"run": 1, "runs": 2}.get(viewed.kind, 0)
    if viewed.kind == "runs" and names and viewed.children.get(names[0]) == "checkpoint":
        above = 1
    return "".join([f"/{name}" for name in names[above:]])


def _origin() -> Document:
    """Return the host and the time of the report."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"host": platform.node(), "time": now, "version": version_of("ckptcore"), "limit": _LIMIT}


def _key(name: str, **parameters: str | int) -> str:
    """Return the key of a document, as the page makes it."""
    return "\n".join([name, *(f"{key}={value}" for key, value in parameters.items())])
