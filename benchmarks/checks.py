"""The check before the training, which must take at most 5 % of the time of the first save of the same state."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any, Final

import torch

import ckptcore
from benchmarks.alternating import Case, Contender, compare
from benchmarks.report import Row
from benchmarks.setting import Setting

_AT_LEAST: Final = 20.0
"""Target: the time of the save divided by that of the check."""

_LAYERS: Final = 12


def rows(setting: Setting) -> Iterator[Row]:
    """Measure a transformer with AdamW, durably saved as a training job does."""
    width = max(8, setting.side(784, 8))  # 1 GiB in all
    model: Any = torch.nn.Sequential(
        *[torch.nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True) for _ in range(_LAYERS)]
    )
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2, width)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "step": 1}
    directory = setting.directory / "checked"
    nbytes = 12 * sum(parameter.numel() for parameter in model.parameters())
    case = Case(
        f"check a model of {12 * _LAYERS} parameters with AdamW",
        [
            Contender("ckptcore.check", lambda: ckptcore.check(state)),
            Contender(
                "ckptcore.save",
                lambda: ckptcore.save(directory, state),
                lambda: shutil.rmtree(directory, ignore_errors=True),
                target=_AT_LEAST,
            ),
        ],
        nbytes=nbytes,
        writes=True,
    )
    yield from compare(case, setting.rounds)
