"""The trainer in JAX and Optax. It takes over a run of PyTorch: weights, moments of Adam, position in the data."""

# mypy: allow-untyped-calls, disable-error-code="import-untyped"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

import ckptcore
from examples.handover.digits import LEARNING_RATE, SHAPES, batches

OPTIMIZER = optax.adamw(LEARNING_RATE, weight_decay=0.01)  # the default weight decay of torch.optim.AdamW

Params: TypeAlias = dict[str, jax.Array]


def mean_loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the cross entropy of a batch. Weights are in the order of PyTorch: outputs, inputs."""
    hidden = jax.nn.relu(images @ params["hidden.weight"].T + params["hidden.bias"])
    logits = hidden @ params["output.weight"].T + params["output.bias"]
    losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


@jax.jit
def train_step(
    params: Params, opt_state: optax.OptState, images: jax.Array, labels: jax.Array
) -> tuple[Params, optax.OptState, jax.Array]:
    """Return the parameters and the optimizer state after a step, and the loss before it."""
    loss, gradients = jax.value_and_grad(mean_loss)(params, images, labels)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


class Training:
    """A network, its optimizer and its data."""

    def __init__(self, checkpointer: ckptcore.Checkpointer) -> None:
        """Load the newest step of a run that PyTorch saved."""
        array = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
        moments = {
            number: {"step": jax.ShapeDtypeStruct((), jnp.float32), "exp_avg": like, "exp_avg_sq": like}
            for number, like in enumerate(array.values())
        }
        self.data = batches()
        # The abstract leaves state what to build: arrays of JAX, whatever framework saved them. The iterator is
        # restored in place.
        loaded: dict[str, Any] = checkpointer.load_checkpointables(
            abstract={"model": array, "optimizer": {"state": moments, "param_groups": ckptcore.PLACEHOLDER}},
            into={"data": self.data},
        )
        self.params: Params = loaded["model"]
        # PyTorch numbers the parameters and Optax names them. Both have the same two moments of each.
        adam = dict(zip(SHAPES, loaded["optimizer"]["state"].values(), strict=True))
        self.opt_state: optax.OptState = optax.tree_utils.tree_set(
            OPTIMIZER.init(self.params),
            count=adam["hidden.weight"]["step"].astype(jnp.int32),
            mu={name: slots["exp_avg"] for name, slots in adam.items()},
            nu={name: slots["exp_avg_sq"] for name, slots in adam.items()},
        )

    def losses(self) -> Iterator[float]:
        """Train. Yield the loss of each step after the step."""
        for batch in self.data:
            self.params, self.opt_state, loss = train_step(self.params, self.opt_state, batch["image"], batch["label"])
            yield float(loss)
