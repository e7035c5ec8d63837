"""Reports: the page and its documents in one HTML file that needs no server and no network."""

from __future__ import annotations

import base64
import gzip
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ckptcore_tools.outline import leaf_filter

from ckptcore.commit.location import LocationLike
from ckptcore.context import Context, default_context
from ckptcore.errors import CheckpointError
from ckptcore.model import ArrayRecord
from ckptcore.plain_safetensors import replace_file
from ckptcore.redaction import redacted
from ckptcore.step_names import StepNames
from ckptcore_view.assets import MODULES, charts_script, import_map, page_file, page_html
from ckptcore_view.documents import BadRequestError, Document, Request, document_of
from ckptcore_view.viewed import OTHER, OpenTree, Viewed

__all__ = ["write_report"]

_READ_BYTES: Final = 1_000_000_000
"""A report reads all arrays if they have at most this size in all steps together, unless the caller chooses arrays."""

_MAX_ARRAYS: Final = 2_000
"""Limit of the arrays that a report describes, unless the caller chooses arrays."""

_NONCE: Final = "report"
_POLICY: Final = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline' data:; "
    "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'\">"
)
"""Nothing is loaded from the network. Modules are ``data:`` URLs: scripts in one file have no other address."""


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

    The report of a run has the checkpoint of its newest step, and the norms of the chosen arrays over all steps.

    Args:
        path: the file.
        location: a path or URL of a checkpoint or run.
        arrays: patterns of the paths of the arrays to read for statistics, norms and differences: each is a part of a
            path, or has wildcards as for `ckptcore.select.glob`. None: all arrays if they have at most 1 GB, those of
            all steps together, or else none.
        compare: a checkpoint to compare with.
        policy: the text of a preservation policy; the report of a run shows what it keeps.
        step_names: the names of steps; None for the usual names.
        context: options.

    Raises:
        CheckpointNotFoundError: there is neither a checkpoint nor a run.
        CheckpointError: the checkpoint cannot be read.
        ValueError: the policy is not valid.
    """
    other = "" if compare is None else str(compare)
    viewed = Viewed(str(location), context or default_context(), other=other, policy=policy, step_names=step_names)
    replace_file(path, [_report_html(viewed, arrays).encode()])


def _report_html(viewed: Viewed, arrays: Sequence[str] | None = None) -> str:
    """Return the HTML of a report. See `write_report`."""
    documents = _Collector(viewed, arrays).collect()
    addresses = {name: f"data:text/javascript;base64,{_base64(page_file(f'{name}.js').encode())}" for name in MODULES}
    data = _element("documents", json.dumps(documents)) + _element("charts", charts_script())
    return page_html(
        imports=import_map(addresses),
        style=f"<style>{page_file('style.css')}</style>",
        data=data,
        nonce=_NONCE,
        policy=_POLICY,
    )


def _element(name: str, text: str) -> str:
    """Return an element with compressed text. Base64 cannot end it early, whatever the text is."""
    return f'<script type="text/plain" id="{name}">{_base64(gzip.compress(text.encode(), mtime=0))}</script>\n'


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


class _Collector:
    """Collects the documents that the page of a report can show."""

    def __init__(self, viewed: Viewed, arrays: Sequence[str] | None) -> None:
        self._viewed = viewed
        self._patterns = arrays
        self._documents: dict[str, Document] = {}

    def collect(self) -> Mapping[str, Document]:
        """Return the documents by name and parameters, as the page asks for them."""
        self._add("view")
        if self._viewed.kind != "run":
            self._add_checkpoint("", ())
            return self._documents
        run = self._add("run", **({"policy": self._viewed.policy} if self._viewed.policy else {}))
        self._documents[_key("run")] = run
        steps: Any = run["steps"]
        loadable = [step["name"] for step in steps if step["state"] in ("committed", "foreign")]
        if loadable:
            self._add_checkpoint(loadable[-1], loadable)
        return self._documents

    def _add(self, name: str, **parameters: str | int) -> Mapping[str, Any]:
        """Add a document. An error is a document, too: the page shows it."""
        found: Document
        try:
            found = document_of(self._viewed, name, Request({key: str(value) for key, value in parameters.items()}))
        except (CheckpointError, BadRequestError) as error:
            if name in ("view", "run", "checkpoint"):
                raise
            found = {"error": redacted(str(error))}
        self._documents[_key(name, **parameters)] = found
        return found

    def _add_checkpoint(self, place: str, steps: Sequence[str]) -> None:
        checkpoint = self._add("checkpoint", at=place)
        if checkpoint["kind"] == "tree":
            self._add_tree(place, steps)
        for one in checkpoint.get("checkpointables", ()):
            for directory in one["places"][:1]:
                self._add_checkpoint(f"{place}/{directory}" if place else directory, steps)

    def _add_tree(self, place: str, steps: Sequence[str]) -> None:
        self._add("tree", at=place)
        described, read = self._viewed.read(place, lambda opened: self._choose(opened, max(1, len(steps))))
        for leaf in described:
            self._add("array", at=place, leaf=leaf)
        for leaf in read:
            self._add("statistics", at=place, leaf=leaf)
            self._add("elements", at=place, leaf=leaf)
        _, _, inside = place.partition("/") if steps else ("", "", place)
        inside = f"/{inside}" if inside else ""
        if self._viewed.other:
            self._add_differences(place, f"{OTHER}{'' if steps else inside}", read)
        elif len(steps) > 1:
            self._add_differences(place, f"{steps[-2]}{inside}", read)
        for name in steps:
            for leaf in read:
                self._add("statistics", at=f"{name}{inside}", leaf=leaf, of=place)

    def _add_differences(self, place: str, other: str, read: Sequence[int]) -> None:
        found = self._add("differences", at=place, other=other)
        in_both = {pair["leaf"] for pair in found.get("pairs", ())}
        for leaf in read:
            if leaf in in_both:
                self._add("difference", at=place, other=other, leaf=leaf)

    def _choose(self, opened: OpenTree, times: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return the arrays that are described, and those that are also read, from so many checkpoints."""
        tree, patterns = opened.tree, self._patterns
        arrays = [leaf for leaf, record in enumerate(tree.leaves) if isinstance(record, ArrayRecord)]
        if patterns is None:
            return arrays[:_MAX_ARRAYS], arrays[:_MAX_ARRAYS] if tree.nbytes * times <= _READ_BYTES else ()
        chosen = {leaf for pattern in patterns for leaf in leaf_filter(pattern)(tree)}
        return (matching := sorted(chosen.intersection(arrays))), matching


def _key(name: str, **parameters: str | int) -> str:
    """Return the key of a document, as the page makes it."""
    return "\n".join([name, *(f"{key}={value}" for key, value in parameters.items())])
