"""Run the demo: ``python -m examples.demo``, or ``make demo``. The exit code is 1 if a claim is false.

The first part is a run that is killed in PyTorch and resumes in JAX. The other parts check claims about formats and
frameworks.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from pathlib import Path


def main() -> int:
    """Run all parts. Return the exit code."""
    # Set before JAX is imported: four devices on one CPU, so that weights are sharded.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax logs every phase

    from examples.handover import demo as handover
    from examples.minilm import demo as minilm
    from examples.minilm.pretrained import model_directory
    from examples.minilm.report import Report
    from examples.with_orbax import demo as with_orbax

    report = Report()
    with tempfile.TemporaryDirectory(prefix="ckptcore-demo-") as scratch:
        report.chapter("A run that is killed in PyTorch, and resumes in JAX")
        run = Path(scratch) / "run"
        handover.run_steps(report, run)
        page = handover.write_page(report, run)

        report.chapter("One checkpoint in NumPy, PyTorch, JAX and Orbax")
        report.brief = True
        for part in (minilm, with_orbax):
            directory = Path(scratch) / part.__name__
            directory.mkdir()
            part.run_steps(report, model_directory(), directory)
    failed = report.finish()
    print(f"\nThe report of the run: {page}")
    print(f"Open it in a browser: {page.as_uri()}")
    print(f"It is one file, without a server: `xdg-open {page.name}`, or copy it to your machine and open it there.")
    return failed


if __name__ == "__main__":
    sys.exit(main())
