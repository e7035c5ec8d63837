"""The account of a load: what it does with each leaf, kept from its plan until it is done and can be told."""

from __future__ import annotations

from dataclasses import dataclass

from ckptcore.loading.checkpoint import Checkpoint
from ckptcore.loading.matching import Matched
from ckptcore.loading.matching_options import LeafChange, LoadReport
from ckptcore.model.tree import TreePath, format_path, leaf_paths

__all__ = ["LoadAccount"]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is planned of a checkpoint.

    Attributes:
        opened: the checkpoint.
        before: how many bytes were read of it when the plan was made.
        matched: which stored leaf each leaf is.
    """

    opened: Checkpoint
    before: int
    matched: Matched


class LoadAccount:
    """Keeps what the last try of a load planned, and tells the report once the load is done."""

    def __init__(self, report: LoadReport) -> None:
        """`report` is what the caller made."""
        self._report = report
        self._plan: _Plan | None = None

    def planned(self, opened: Checkpoint, matched: Matched) -> None:
        """A try was planned, and nothing is read yet. What an earlier try planned is forgotten."""
        self._plan = _Plan(opened, _bytes_read(opened), matched)

    def done(self) -> None:
        """The load is done."""
        if self._plan is not None:
            self._report.take(_told(self._plan))


def _told(plan: _Plan) -> LoadReport:
    stored, matched = plan.opened.tree.paths, plan.matched
    paths = list(leaf_paths(matched.skeleton))
    defaulted = set(matched.defaulted)
    restored: list[TreePath] = []
    skipped: list[TreePath] = []
    changed: dict[str, LeafChange] = {}
    for position, (path, number, handler) in enumerate(zip(paths, matched.numbers, matched.handlers, strict=True)):
        if position in defaulted:
            continue
        if number is not None and number in matched.adjustments:
            changed[format_path(path)] = matched.adjustments[number].change
        else:
            (skipped if handler is None else restored).append(path)
    return LoadReport(
        restored=[format_path(path) for path in restored],
        changed=changed,
        defaulted=[format_path(paths[position]) for position in matched.defaulted],
        skipped=[format_path(path) for path in skipped],
        ignored=[format_path(stored[number]) for number in matched.ignored],
        bytes_read=_bytes_read(plan.opened) - plan.before,
    )


def _bytes_read(opened: Checkpoint) -> int:
    """Bytes that were asked of the storage by now, also for further checkpoints that arrays are made of."""
    if opened.derived is not None:
        return sum(map(_bytes_read, opened.derived.below))
    return opened.store.bytes_read + opened.store.bytes_got
