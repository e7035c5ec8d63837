"""The trainer, in PyTorch: trains in float32, and publishes the weights in bfloat16."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from ckptcore_versions import Publisher
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from examples.serving.network import CLASSES, HIDDEN, INPUTS, STEPS, VERSIONS, examples, questions


def network() -> torch.nn.Module:
    """Return the network with new weights."""
    torch.manual_seed(0)
    layers = {
        "hidden": torch.nn.Linear(INPUTS, HIDDEN),
        "relu": torch.nn.ReLU(),
        "output": torch.nn.Linear(HIDDEN, CLASSES),
    }
    return torch.nn.Sequential(OrderedDict(layers))


def train(directory: Path) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Train, and publish versions. Yield the number of each, and the logits of its weights."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-6)
    inputs, classes = map(torch.from_numpy, examples(512, seed=2))
    with Publisher(directory, run="serving") as publisher:
        for version in range(VERSIONS):
            for _ in range(STEPS):
                optimizer.zero_grad()
                cross_entropy(model(inputs), classes).backward()  # type: ignore[no-untyped-call]  # PyTorch's own
                optimizer.step()
            weights = {name: parameter.detach().bfloat16() for name, parameter in model.named_parameters()}
            publisher.publish(version, weights, step=STEPS * (version + 1))
            yield version, logits(weights)


def logits(weights: dict[str, torch.Tensor]) -> NDArray[np.float32]:
    """Return the logits of weights that were rounded to bfloat16."""
    model = network()
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    with torch.no_grad():
        answers: NDArray[np.float32] = model(torch.from_numpy(questions())).numpy()
    return answers
