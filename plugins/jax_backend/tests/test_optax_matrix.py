"""Every optimizer and wrapper of Optax, resumed from every kind of file with every kind of request."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

from plugins.jax_backend.tests.resumed_programs import Program, assert_all_resume, assert_some_resume, own

X: Final = jnp.linspace(-1, 1, 20).reshape(5, 4)
SCHEDULE: Final = optax.linear_schedule(1e-2, 1e-3, 100)

ALIASES: Final[dict[str, Callable[[], Any]]] = {
    "adabelief": lambda: optax.adabelief(SCHEDULE),
    "adadelta": lambda: optax.adadelta(SCHEDULE, weight_decay=0.1),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2, momentum=0.9, dtype_momentum=jnp.bfloat16),
    "adagrad": lambda: optax.adagrad(1e-2),
    "adam": lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "adamax": lambda: optax.adamax(1e-2),
    "adamaxw": lambda: optax.adamaxw(1e-2),
    "adamw": lambda: optax.adamw(SCHEDULE),
    "adan": lambda: optax.adan(1e-2),
    "amsgrad": lambda: optax.amsgrad(1e-2),
    "fromage": lambda: optax.fromage(1e-2),
    "lamb": lambda: optax.lamb(1e-2),
    "lars": lambda: optax.lars(1e-2),
    "lbfgs": lambda: optax.lbfgs(memory_size=2),
    "lion": lambda: optax.lion(1e-2),
    "nadam": lambda: optax.nadam(1e-2),
    "nadamw": lambda: optax.nadamw(1e-2),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=jax.random.key(0)),
    "novograd": lambda: optax.novograd(1e-2),
    "optimistic_adam": lambda: optax.optimistic_adam(1e-2),
    "optimistic_adam_v2": lambda: optax.optimistic_adam_v2(1e-2),
    "optimistic_gradient_descent": lambda: optax.optimistic_gradient_descent(1e-2),
    "polyak_sgd": lambda: optax.polyak_sgd(),
    "radam": lambda: optax.radam(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-2, centered=True, momentum=0.9, bias_correction=True),
    "rprop": lambda: optax.rprop(1e-2),
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "sign_sgd": lambda: optax.sign_sgd(1e-2),
    "signum": lambda: optax.signum(1e-2),
    "sm3": lambda: optax.sm3(1e-2),
    "yogi": lambda: optax.yogi(1e-2),
}

CONTRIB: Final[dict[str, Callable[[], Any]]] = {
    "contrib.ademamix": lambda: contrib.ademamix(1e-2),
    "contrib.adopt": lambda: contrib.adopt(1e-2),
    "contrib.cocob": lambda: contrib.cocob(),
    "contrib.dadapt_adamw": lambda: contrib.dadapt_adamw(1.0),
    "contrib.dog": lambda: contrib.dog(1.0),
    "contrib.dowg": lambda: contrib.dowg(),
    "contrib.galore": lambda: contrib.galore(1e-2, rank=2),
    "contrib.madgrad": lambda: contrib.madgrad(1e-2),
    "contrib.mechanize": lambda: contrib.mechanize(optax.adam(1.0)),
    "contrib.momo_adam": lambda: contrib.momo_adam(1e-2),
    "contrib.muon": lambda: contrib.muon(1e-2),
    "contrib.prodigy": lambda: contrib.prodigy(1.0),
    "contrib.reduce_on_plateau": lambda: optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau(patience=1)),
    "contrib.schedule_free": lambda: contrib.schedule_free(optax.sgd(1e-2), 1e-2),
    "contrib.schedule_free_adamw": lambda: contrib.schedule_free_adamw(1e-2),
    "contrib.simplified_ademamix": lambda: contrib.simplified_ademamix(1e-2),
    "contrib.split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(optax.adam(1e-2)),
}


def _is_matrix(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim == 2, tree)


def _labels(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim == 2 else "rest", tree)


WRAPPERS: Final[dict[str, Callable[[], Any]]] = {
    "MultiSteps": lambda: optax.MultiSteps(optax.adamw(SCHEDULE), 2),
    "apply_every": lambda: optax.chain(optax.apply_every(2), optax.adam(1e-2)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.zero_nans(),
        optax.add_noise(0.1, 0.5, key=jax.random.key(0)),
        optax.identity(),
        optax.scale_by_adam(),
        optax.add_decayed_weights(1e-2),
        optax.scale_by_learning_rate(SCHEDULE),
    ),
    "conditionally_mask": lambda: optax.conditionally_mask(optax.adam(1e-2), lambda step: step % 2 == 0),
    "conditionally_transform": lambda: optax.conditionally_transform(optax.adam(1e-2), lambda step: step % 2 == 0),
    "ema": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "flatten": lambda: optax.flatten(optax.adam(1e-2)),
    "freeze": lambda: optax.chain(optax.adam(1e-2), optax.transforms.selective_transform(
        optax.sgd(1.0, 0.9), freeze_mask=_is_matrix
    )),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(SCHEDULE, 0.8, weight_decay=jnp.float32(0.1)),
    "lookahead": lambda: optax.lookahead(optax.adam(1e-2), 2, 0.5),
    "masked": lambda: optax.masked(optax.adam(1e-2), _is_matrix),
    "snapshot": lambda: optax.chain(optax.snapshot("last", lambda updates: updates), optax.adam(1e-2)),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.adamw(SCHEDULE), "rest": optax.set_to_zero()}, _labels
    ),
    "multi_transform True": lambda: optax.multi_transform({True: optax.adam(1e-2), False: optax.sgd(1e-2)}, _is_matrix),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(1.0)), ("adam", optax.adam(1e-2))),
    "scale_by_backtracking_linesearch": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5, store_grad=True)
    ),
    "skip_not_finite": lambda: optax.MultiSteps(
        optax.adam(1e-2), 2, should_skip_update_fn=optax.skip_not_finite
    ),
}  # fmt: skip

OPTIMIZERS: Final = {**ALIASES, **CONTRIB, **WRAPPERS}


def parameters(seed: int) -> Any:
    kernel = jax.random.normal(jax.random.key(seed), (4, 3))
    return {"dense": {"kernel": kernel, "bias": jnp.full(3, 0.1, jnp.float32)}, "scale": jnp.float32(1.5 + seed)}


def loss(tree: Any) -> Any:
    return jnp.mean((X @ tree["dense"]["kernel"] + tree["dense"]["bias"]) ** 2) * tree.get("scale", 1.0) ** 2


@functools.cache
def program(name: str) -> Program:
    optimizer = optax.with_extra_args_support(OPTIMIZERS[name]())
    fast: Callable[[Any], Any] = (lambda tree: tree.fast) if name == "lookahead" else (lambda tree: tree)

    def new(seed: int) -> Any:
        tree = parameters(seed)
        if name == "sm3":
            del tree["scale"]  # this optimizer cannot train scalars
        if name == "lookahead":
            tree = optax.LookaheadParams.init_synced(tree)
        return own({"parameters": tree, "optimizer": optimizer.init(tree)})

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any) -> Any:
        tree, inner = state["parameters"], state["optimizer"]
        value, gradients = jax.value_and_grad(loss)(fast(tree))
        updates, inner = optimizer.update(gradients, inner, tree, value=value, grad=gradients, value_fn=loss)
        return {"parameters": optax.apply_updates(tree, updates), "optimizer": inner}

    refused = ("Orbax 0", "Orbax 1") if name == "contrib.galore" else ()  # Orbax cannot save empty arrays
    return Program(new, step, lambda: jax.eval_shape(lambda: new(1)), refused=refused)


pytestmark = pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated:DeprecationWarning")


def test_one_cell_for_each_writer_resumes(tmp_path: Path) -> None:
    assert_some_resume(program("MultiSteps"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.brings(f"`{name}`", "optax", "same")) for name in OPTIMIZERS]
)
def test_all_ways(name: str, tmp_path: Path, full: bool, subtests: pytest.Subtests) -> None:
    assert_all_resume(program(name), tmp_path, subtests, full=full)


def test_every_alias_is_tried() -> None:
    """Fails if a new version of Optax adds an optimizer, until `ALIASES` has its arguments."""
    # Some aliases are partial functions.
    made_by = {name: getattr(value, "func", value) for name, value in vars(optax).items()}
    exported = {name for name, value in made_by.items() if getattr(value, "__module__", "") == "optax._src.alias"}
    assert exported == set(ALIASES)
