"""The demo: a trainer publishes versions, a server in another process follows, and their logits agree."""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path

import numpy as np

from examples.minilm.report import Report
from examples.serving.network import VERSIONS
from examples.serving.server import serve
from examples.serving.trainer import train

_SECONDS = 120.0
_CLOSE = 1e-4
"""Tolerance of logits: two frameworks add the same numbers in another order."""


def main() -> int:
    """Run the demo. Return the exit code: 1 if a claim is false."""
    report = Report()
    with tempfile.TemporaryDirectory(prefix="ckptcore-demo-") as scratch:
        directory, cache = Path(scratch) / "weights", Path(scratch) / "cache"
        spawning = multiprocessing.get_context("spawn")  # a forked process could not use JAX
        answers, sending = spawning.Pipe(duplex=False)
        server = spawning.Process(target=serve, args=(directory, cache, sending))
        server.start()
        sending.close()  # the server has its own copy, so that its end is noticed
        try:
            report.step("Train in PyTorch, and answer with each version in JAX")
            for version, expected in train(directory):
                received = answers.recv() if answers.poll(_SECONDS) else (None, np.nan)
                differences = np.abs(received[1] - expected)
                report.claim(
                    f"version {version}: the logits of the server are those of the trainer",
                    received[0] == version and bool(differences.max() < _CLOSE),
                )
            server.join(_SECONDS)
            report.claim("the server has followed to the end", server.exitcode == 0)
        finally:
            server.kill()
            server.join()
        first, *others = [_nbytes(directory / f"v{number:06d}") for number in range(VERSIONS)]
        report.say(f"the first version takes {first} bytes, a later one {sum(others) // len(others)} on average")
        report.claim("a later version takes less than a third of the first", max(others) * 3 < first)
    return report.finish()


def _nbytes(version: Path) -> int:
    return sum([file.stat().st_size for file in version.rglob("*") if file.is_file()])
