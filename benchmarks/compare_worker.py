"""One process of `benchmarks.compare`: runs one benchmark of one worktree, a timed run for each request.

The program is started by its path, with the worktree first in ``PYTHONPATH``, so the benchmarks and the library are
those of the worktree, which may be older than this file. It uses only names that every worktree has: `Setting`, `Row`,
and `Case`, `Times`, `compare`, `huge` and `timed_rows` of `benchmarks.alternating`.

Requests and replies are lines of JSON on the standard streams. Output of benchmarks goes to the standard error.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import statistics
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from benchmarks import alternating
from benchmarks.alternating import Case, Contender, Times
from benchmarks.report import Row
from benchmarks.setting import Setting


class Worker:
    """Serves one benchmark.

    Args:
        requests: lines from `benchmarks.compare`.
        replies: lines to it.
    """

    def __init__(self, requests: TextIO, replies: TextIO) -> None:
        self._requests = requests
        self._replies = replies
        self._served: Collection[str] | None = None
        self._cases: dict[str, Sequence[str]] = {}

    def serve(self) -> None:
        """Run the benchmark of the first request, pause in each case that it names, and reply with all other rows.

        Without names of cases each contender runs once, and the reply lists the cases.
        """
        request = self._receive()
        self._served = request["cases"]
        alternating.compare = self._compare
        module = importlib.import_module(f"benchmarks.{request['benchmark']}")
        setting = Setting(Path(request["directory"]), request["rounds"], request["scale"])
        rows: list[Row] = [row for row in module.rows(setting) if row.case not in self._cases]
        self._send({"cases": self._cases, "rows": [dataclasses.asdict(row) for row in rows]})

    def _compare(self, case: Case, rounds: int) -> Sequence[Row]:
        """Run the contenders of ckptcore as requested. Takes the place of `benchmarks.alternating.compare`."""
        first, *others = case.contenders
        ours = [first, *[contender for contender in others if "ckptcore" in contender.name]]
        case = dataclasses.replace(case, contenders=ours)
        times = {contender.name: Times() for contender in ours}
        self._cases[case.name] = list(times)
        if self._served is None or case.name not in self._served:
            for contender in ours:
                _run(case, contender, times[contender.name])
            return alternating.timed_rows(case, times)
        self._send({"case": case.name, "contenders": list(times)})
        while "run" in (request := self._receive()):
            contender = ours[request["run"]]
            into = Times()
            for _ in range(request["repeats"]):
                _run(case, contender, into)
            reply = {"seconds": statistics.median(into.seconds), "nbytes_read": statistics.median(into.nbytes_read)}
            # One number for each round, because the number of repeats differs between contenders.
            times[contender.name].seconds.append(reply["seconds"])
            self._send(reply)
        # Contenders that the other worktree lacks have not run.
        run = [contender for contender in ours if times[contender.name].seconds]
        return alternating.timed_rows(dataclasses.replace(case, contenders=run), times) if run else ()

    def _receive(self) -> Mapping[str, Any]:
        line = self._requests.readline()
        if not line:
            raise SystemExit("benchmarks.compare ended")
        request: Mapping[str, Any] = json.loads(line)
        return request

    def _send(self, reply: Mapping[str, Any]) -> None:
        self._replies.write(json.dumps(reply) + "\n")
        self._replies.flush()


def _run(case: Case, contender: Contender, into: Times) -> None:
    """Run a contender once, as `benchmarks.alternating.measure` does, and append its measurements."""
    memory = case.nbytes * (2 if case.writes else 1) if case.memory is None else case.memory
    contender.prepare()
    if case.writes:
        os.sync()
    alternating._fault_in(memory)
    result = alternating.run_once(contender, into)
    contender.after(result)


def main(tree: Path) -> None:
    """Serve a benchmark of a worktree, after a check that the library is the worktree's."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    ckptcore = importlib.import_module("ckptcore")
    source = Path(str(ckptcore.__file__)).resolve()
    if not source.is_relative_to(tree):
        raise SystemExit(f"expected ckptcore of {tree}, found {source}")
    Worker(sys.stdin, replies).serve()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
