"""The demo: PyTorch trains and is killed during a save, JAX resumes from the last step, and the losses agree."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from ckptcore_view.report import write_report

import ckptcore
from ckptcore.policies import FixedInterval
from examples.handover import in_jax, in_torch
from examples.handover.digits import SAVE_EVERY, STEPS
from examples.handover.killing import hidden_directories, train_and_kill
from examples.minilm.report import Report

_KILL_AFTER = STEPS // 2 - 1
_PAGE = Path("report.html")
_CLOSE = 1e-3
"""Relative tolerance of losses: two frameworks add the same numbers in another order."""


def main() -> int:
    """Run the demo. Return the exit code: 1 if a claim is false."""
    report = Report()
    with tempfile.TemporaryDirectory(prefix="ckptcore-demo-") as scratch:
        directory = Path(scratch) / "run"
        run_steps(report, directory)
        write_page(report, directory)
    return report.finish()


def write_page(report: Report, directory: Path) -> Path:
    """Write the report of the run into the working directory. Return its path."""
    report.step("Look at the run")
    page = _PAGE.absolute()
    with contextlib.chdir(directory.parent):  # the page names the run as it is named here
        write_report(page, directory.name, policy=f"every_n_steps={STEPS // 3},latest_n=3")
    report.claim(f"{_PAGE} shows the run in a browser: steps, losses, trees, norms of weights", page.exists())
    return page


def run_steps(report: Report, directory: Path) -> None:
    """Run all steps of training in the directory of a run."""
    report.step("Train in PyTorch, and kill it in the middle of a save")
    killed = train_and_kill(directory, after=_KILL_AFTER)
    reader = ckptcore.CheckpointReader(directory)
    report.say(
        f"a process trained on digits of scikit-learn, saved every {SAVE_EVERY} steps, and was killed while it wrote"
    )
    report.say(f"{killed.leftover} ({killed.nbytes / 1e6:.1f} MB), after step {len(killed.losses)}")
    last = killed.step - SAVE_EVERY
    report.claim(f"step {killed.step} was not committed: no reader sees it", killed.step not in reader.steps)
    report.claim(
        f"step {last} was committed, and is valid", reader.latest == last and ckptcore.verify(directory / str(last)).ok
    )
    report.claim("the files of the killed save still exist", hidden_directories(directory) == [killed.leftover])

    report.step("Resume in JAX: weights, moments of Adam, position in the data")
    losses = dict(enumerate(killed.losses[:last], 1))
    with ckptcore.Checkpointer(directory, save_policy=FixedInterval(SAVE_EVERY)) as checkpointer:
        training = in_jax.Training(checkpointer)
        checkpointer.wait()
        report.claim("opening the directory removed the files of the killed save", hidden_directories(directory) == [])
        report.claim(f"JAX resumes from step {checkpointer.restored_step}", checkpointer.restored_step == last)
        # Steps after the last save of PyTorch are lost, and are repeated.
        for step, loss in zip(range(last + 1, STEPS + 1), training.losses(), strict=False):
            losses[step] = loss
            checkpointer.save_checkpointables(
                step,
                {"model": training.params, "optimizer": training.opt_state, "data": training.data},
                metrics={"loss": loss},
            )
    steps = ckptcore.CheckpointReader(directory).steps
    report.say(f"steps {', '.join(map(str, steps))}")
    report.claim(
        "the steps of JAX are in the same directory as those of PyTorch",
        steps == tuple(range(SAVE_EVERY, STEPS + 1, SAVE_EVERY)),
    )

    report.step("Compare with a run in PyTorch that was not killed")
    straight = dict(enumerate(islice(in_torch.Training().losses(), STEPS), 1))
    shown = [1, last // 2, last, last + 1, last + 2, (last + STEPS) // 2, STEPS]
    report.say(f"{'step':>6}  {'this run':>9}            {'not killed':>10}")
    for step in shown:
        who = "PyTorch" if step <= last else "JAX    "
        report.say(f"{step:>6}  {losses[step]:>9.5f}  {who}   {straight[step]:>10.5f}")
    report.claim(
        f"the losses agree at every step within {_CLOSE:.1%}: {_furthest(losses, straight):.1e}",
        losses.keys() == straight.keys() and _furthest(losses, straight) < _CLOSE,
    )
    report.claim(
        f"the loss decreases further: {_mean(losses, last - 9, last):.3f} over the last ten steps of PyTorch, "
        f"{_mean(losses, STEPS - 9, STEPS):.3f} over those of JAX",
        _mean(losses, STEPS - 9, STEPS) < _mean(losses, last - 9, last) < _mean(losses, 1, 10),
    )


def _furthest(losses: Mapping[int, float], expected: Mapping[int, float]) -> float:
    return max(abs(losses[step] - loss) / loss for step, loss in expected.items())


def _mean(losses: Mapping[int, float], first: int, last: int) -> float:
    return sum(losses[step] for step in range(first, last + 1)) / (last + 1 - first)
