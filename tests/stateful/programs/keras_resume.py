"""Save a model of Keras, load it into a new one, and continue to train both. Prints the compared values."""

from __future__ import annotations

import sys
from typing import Any

import keras  # type: ignore[import-untyped]  # ships no types
import numpy as np

import ckptcore
from ckptcore.errors import TreeMismatchError
from ckptcore.handlers import StateTreeHandler
from ckptcore.plugins import installed_plugins

INPUTS = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
TARGETS = INPUTS.sum(axis=1, keepdims=True)


def make(seed: int, name: str = "out") -> Any:
    """Return a compiled model that is not trained yet."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    layers = [
        keras.Input((3,), name="in"),
        keras.layers.Dense(4, name="hidden"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dropout(0.5, seed=seed, name="drop"),
        keras.layers.Dense(1, name=name),
    ]
    model = keras.Sequential(layers, name="model")
    model.compile(keras.optimizers.Adam(0.01, name="adam"), "mse", metrics=["mae"])
    return model


def train(model: Any, epochs: int) -> None:
    """Train for some epochs with fixed data."""
    model.fit(INPUTS, TARGETS, batch_size=4, epochs=epochs, shuffle=False, verbose=0)


def bits(model: Any) -> dict[str, bytes]:
    """Return the bytes of every variable."""
    variables = {variable.path: variable for variable in (*model.variables, *model.optimizer.variables)}
    return {path: keras.ops.convert_to_numpy(variable.value).tobytes() for path, variable in variables.items()}


def _arrays(tree: Any) -> list[Any]:
    """Return the arrays of a state tree."""
    return [keras.ops.convert_to_numpy(leaf) for leaf in keras.tree.flatten(tree)]


def main(directory: str) -> None:
    """Save, load, continue to train, and compare."""
    model = make(0)
    assert type(installed_plugins().dispatch(model).checkpointable) is StateTreeHandler
    train(model, 2)
    ckptcore.save(f"{directory}/step", {"model": model})
    saved = bits(model)

    other = make(1)
    ckptcore.load_into(f"{directory}/step", {"model": other})
    # A new model creates the variables of this metric in its first step, and resets them in each epoch.
    assert bits(other) == {path: held for path, held in saved.items() if "mean_absolute_error" not in path}
    tree = ckptcore.load(f"{directory}/step", ckptcore.abstract({"model": model}))["model"]
    assert [array.tobytes() for array in _arrays(tree)] == [
        array.tobytes() for array in _arrays(ckptcore.load(f"{directory}/step")["model"])
    ]
    train(model, 2)
    train(other, 2)
    assert bits(other) == bits(model)
    assert bits(other) != saved

    try:
        ckptcore.load_into(f"{directory}/step", {"model": make(3, name="renamed")})
    except TreeMismatchError as error:
        assert "renamed" in str(error)
    else:
        raise AssertionError("a model with a layer of another name was loaded into")
    print(keras.backend.backend(), len(saved))


if __name__ == "__main__":
    main(sys.argv[1])
