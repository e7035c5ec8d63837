"""A toy run directory for ckptcore: each step is in two directories, and a load falls back to the second."""

from __future__ import annotations

import dataclasses
import heapq
import itertools

import ckptcore
from ckptcore.training import PathDirectory


class MirroredDirectory:
    """The `RunDirectory` of a run whose saves also copy each step to a second directory before they complete."""

    def __init__(self, first, second):
        self.location = first
        self._places = (PathDirectory(first), PathDirectory(second))

    def open(self, names, context):
        return _Steps([place.open(names, context) for place in self._places])

    def own(self, names, context, ownership):
        first, second = self._places
        run = first.own(names, context, ownership)
        try:
            ownership = dataclasses.replace(ownership, agreement=ownership.agreement.part("second"))
            return _Run(run, second.own(names, context, ownership), ownership.agreement.rank == 0)
        except BaseException:
            run.release()
            raise


class _Steps:
    def __init__(self, parts):
        self._parts = parts
        self.directories = [directory for part in parts for directory in part.directories]
        self.main = self.directories[0]

    def reload(self, agreement):
        for number, part in enumerate(self._parts):
            part.reload(agreement.part(str(number)))

    def candidates(self):
        return sorted({step for part in self._parts for step in part.candidates()})

    def steps(self):
        return tuple(sorted({step for part in self._parts for step in part.steps()}))

    def newest_first(self):
        merged = heapq.merge(*[part.newest_first() for part in self._parts], reverse=True)
        return (step for step, _ in itertools.groupby(merged))

    def latest(self):
        return next(self.newest_first(), None)

    def recheck(self, step):
        return any(part.recheck(step) for part in self._parts)

    def copies(self, step):
        return [number for number, part in enumerate(self._parts) if part.copies(step)]

    def copy_location(self, step, number):
        return self._parts[number].copy_location(step, 0)


class _Run:
    def __init__(self, first, second, leads):
        self.steps = _Steps([first.steps, second.steps])
        self._runs = (first, second)
        self._leads = leads

    def begin(self):
        for run in self._runs:
            run.begin()

    def target(self, step, name):
        self._runs[1].target(step, name)
        return self._runs[0].target(step, name)

    def allow(self, step, *, is_new):
        for run in self._runs:
            run.allow(step, is_new=is_new)

    def committed(self, saved):
        if self._leads:
            first, second = (f"{directory.display}/{saved.name}" for directory in self.steps.directories)
            ckptcore.copy(first, second, overwrite=True)
        for run in self._runs:
            run.committed(saved)

    def delete(self, step, agreement):
        for number in self.steps.copies(step):
            self._runs[number].delete(step, agreement.part(str(number)))

    def take_errors(self):
        return [error for run in self._runs for error in run.take_errors()]

    def close(self):
        for run in self._runs:
            run.close()

    def release(self):
        for run in self._runs:
            run.release()
