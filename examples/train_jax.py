"""Train on the digits of scikit-learn with JAX, Optax and Grain, save in the background, and resume bit for bit.

    python examples/train_jax.py --directory runs/jax

Stop the program at any time, also with `kill -9`, and start it again. It resumes from the last committed step, and
prints the same losses as a run that was not stopped.
"""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import ckptcore
from ckptcore.policies import AnyPreservation, BestN, FixedInterval, LatestN

OPTIMIZER = optax.adamw(optax.cosine_decay_schedule(3e-3, decay_steps=1000))


class TrainState(NamedTuple):
    """The state that a step changes. `opt_state` also counts the steps, for the schedule."""

    params: dict[str, jax.Array]
    opt_state: optax.OptState
    key: jax.Array  # dropout draws from it


def load_data(batch_size: int) -> Iterator[dict[str, Any]]:
    """Return an endless iterator of batches, shuffled in each epoch, with noise. Its position can be saved."""
    digits = load_digits()
    examples = [
        {"image": image.reshape(64).astype(np.float32) / 16, "label": label}
        for image, label in zip(digits.images, digits.target, strict=True)
    ]

    def add_noise(example: dict[str, Any], noise: np.random.Generator) -> dict[str, Any]:
        return {**example, "image": example["image"] + noise.normal(0, 0.1, 64).astype(np.float32)}

    dataset = grain.MapDataset.source(examples).seed(0).shuffle().repeat().random_map(add_noise).batch(batch_size)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0)))


@jax.jit
def new_state() -> TrainState:
    """Return the state before the first step."""
    key, first, second = jax.random.split(jax.random.key(0), 3)
    params = {
        "w1": jax.random.normal(first, (64, 128)) * 64**-0.5,
        "b1": jnp.zeros(128),
        "w2": jax.random.normal(second, (128, 10)) * 128**-0.5,
        "b2": jnp.zeros(10),
    }
    return TrainState(params, OPTIMIZER.init(params), key)


def mean_loss(params: dict[str, jax.Array], images: jax.Array, labels: jax.Array, key: jax.Array) -> jax.Array:
    """Return the cross entropy of a batch, with dropout."""
    hidden = jax.nn.relu(images @ params["w1"] + params["b1"])
    hidden = jnp.where(jax.random.bernoulli(key, 0.8, hidden.shape), hidden / 0.8, 0.0)
    logits = hidden @ params["w2"] + params["b2"]
    losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


@jax.jit
def train_step(state: TrainState, images: jax.Array, labels: jax.Array) -> tuple[TrainState, jax.Array]:
    """Return the state after a step, and the loss before it."""
    key, dropout = jax.random.split(state.key)
    loss, gradients = jax.value_and_grad(mean_loss)(state.params, images, labels, dropout)
    updates, opt_state = OPTIMIZER.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(params, opt_state, key), loss


def train(directory: str, *, steps: int, save_every: int) -> None:
    """Train up to a number of steps, from the last step of the run in the directory."""
    state, data = new_state(), load_data(batch_size=64)
    with ckptcore.Checkpointer(
        directory,
        save_policy=FixedInterval(save_every),
        preservation_policy=AnyPreservation([LatestN(3), BestN(1, "loss", "min")]),
        if_in_use="take over",  # only from a job that does not renew its lease
    ) as checkpointer:
        first = 0
        if checkpointer.latest is not None:
            # Load the newest valid step. New arrays are built with the shardings of those in the abstract state; the
            # iterator is restored in place.
            state = checkpointer.load_checkpointables(abstract={"state": state}, into={"data": data})["state"]
            assert checkpointer.restored_step is not None
            first = checkpointer.restored_step
            print(f"resumed from step {first}", flush=True)

        for step in range(first + 1, steps + 1):
            batch = next(data)
            state, loss = train_step(state, batch["image"], batch["label"])
            value = float(loss)
            print(f"step {step} loss {value:.4f} {value.hex()}", flush=True)

            # The call returns at once if the policy does not want the step, and otherwise once the arrays are copied to
            # host memory. An error of the previous save is raised here.
            objects = {"state": state, "data": data}
            checkpointer.save_checkpointables(step, objects, metrics={"loss": value}, force=step == steps)
    # The `with` block has waited for the last save.


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", required=True, help="directory of the run, which is created or resumed")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    options = parser.parse_args(arguments)
    train(options.directory, steps=options.steps, save_every=options.save_every)


if __name__ == "__main__":
    main()
