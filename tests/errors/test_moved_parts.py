"""Parts that are stored under another path: the error proposes transforms that load them, and lists lost leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ckptcore_transforms import Rename

import ckptcore
from ckptcore import PLACEHOLDER, Matching
from ckptcore.errors import TreeMismatchError
from ckptcore.matching.moves import find_moves, whole_parts

optax = pytest.importorskip("optax")

PARAMETERS = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}}
ADAM = optax.adam(1e-3)


def stepped(optimizer: Any, parameters: Any = PARAMETERS) -> Any:
    """Return a state after one step."""
    state = optimizer.init(parameters)
    return optimizer.update(jax.tree.map(jnp.ones_like, parameters), state, parameters)[1]


def refused(path: Path, request: Any) -> str:
    with pytest.raises(TreeMismatchError) as caught:
        ckptcore.load(path, request)
    return str(caught.value)


def followed(path: Path, request: Any, text: str) -> Any:
    """Load with the options that the text proposes."""
    names: dict[str, Any] = {"Rename": Rename, "Matching": Matching}
    transforms = eval(text.partition("transforms=")[2].partition("]")[0] + "]", names)
    _, separator, code = text.rpartition("matching=")
    matching = eval(code.partition(")")[0] + ")", names) if separator else Matching()
    return ckptcore.load(path, request, transforms=transforms, matching=matching)


def assert_equal(actual: Any, expected: Any) -> None:
    structure: Any = jax.tree.structure(actual)
    assert structure == jax.tree.structure(expected)
    assert all(map(np.array_equal, jax.tree.leaves(actual), jax.tree.leaves(expected)))


@pytest.mark.brings("optimizer that became a part of a chain, or left one", "optax", "same")
def test_an_optimizer_in_a_chain(tmp_path: Path) -> None:
    """The moments of Adam are loaded."""
    clipped = optax.chain(optax.clip_by_global_norm(1.0), ADAM)
    alone, chained = stepped(ADAM), stepped(clipped)
    for saved, request, expected in (
        (alone, clipped.init(PARAMETERS), (optax.EmptyState(), alone)),
        (chained, ADAM.init(PARAMETERS), chained[1]),
    ):
        path = tmp_path / str(len(saved[0]))
        ckptcore.save(path, {"p": PARAMETERS, "o": saved})
        text = refused(path, {"p": PARAMETERS, "o": request})
        assert "moved: o" in text and "keep" not in text
        assert_equal(followed(path, {"p": PARAMETERS, "o": request}, text)["o"], expected)


@pytest.mark.parametrize(
    ("wrapped", "inner", "anew"),
    [
        (optax.MultiSteps(ADAM, 2), "inner_opt_state", "mini_step, o.gradient_step, o.acc_grads"),
        (optax.inject_hyperparams(optax.adam)(learning_rate=1e-3), "inner_state", "count, o.hyperparams"),
        (optax.apply_if_finite(ADAM, 3), "inner_state", "notfinite_count, o.last_finite, o.total_notfinite"),
    ],
)
def test_an_optimizer_in_a_wrapper(tmp_path: Path, wrapped: Any, inner: str, anew: str) -> None:
    """The parts that the wrapper adds keep their initial values, and the text lists them."""
    saved, request = stepped(ADAM), wrapped.init(PARAMETERS)
    ckptcore.save(tmp_path / "c", {"o": saved})
    text = refused(tmp_path / "c", {"o": request})
    assert f"moved: o.{inner} is requested, o is stored" in text
    assert text.endswith(f"o.{anew} would start again")
    loaded = followed(tmp_path / "c", {"o": request}, text)["o"]
    assert_equal(getattr(loaded, inner), saved)
    assert_equal(loaded._replace(**{inner: None}), request._replace(**{inner: None}))


@pytest.mark.parametrize(
    ("stored", "requested"),
    [(("params",), ("model",)), (("params",), ()), ((), ("params",)), (("a", "b"), ("c",)), (("x",), ("y", "z"))],
)
def test_names_that_moved_as_a_whole(tmp_path: Path, stored: tuple[str, ...], requested: tuple[str, ...]) -> None:
    def below(path: tuple[str, ...], value: Any) -> Any:
        for key in reversed(path):
            value = {key: value}
        return value

    zeros = jax.tree.map(lambda leaf: leaf - 7, PARAMETERS)
    ckptcore.save(tmp_path / "c", below(stored, PARAMETERS))
    text = refused(tmp_path / "c", below(requested, zeros))
    assert "moved: " in text and "keep" not in text
    assert_equal(followed(tmp_path / "c", below(requested, zeros), text), below(requested, PARAMETERS))


def test_the_state_of_another_optimizer_is_not_moved(tmp_path: Path) -> None:
    """The momentum of SGD is not the mean of Adam, and Lion has no variance. No option mixes their states."""
    request = {"p": PARAMETERS, "o": ADAM.init(PARAMETERS)}
    for name, optimizer in (("TraceState", optax.sgd(1e-3, momentum=0.9)), ("ScaleByLionState", optax.lion(1e-3))):
        ckptcore.save(tmp_path / name, {"p": PARAMETERS, "o": stepped(optimizer)})
        text = refused(tmp_path / name, request)
        assert f"o[0]: kind: a ScaleByAdamState is requested, a {name} is stored" in text
        assert "moved" not in text and "matching=" not in text
        with pytest.raises(TreeMismatchError, match="a ScaleByAdamState is requested"):
            ckptcore.load(tmp_path / name, request, matching=Matching(missing="keep", unexpected="ignore"))
        loaded = ckptcore.load(tmp_path / name, {**request, "o": PLACEHOLDER})
        assert_equal(loaded["p"], PARAMETERS)


def test_another_optimizer_of_flax(tmp_path: Path) -> None:
    """States of Optax in Flax are dicts. Their parameters may differ: a new head keeps its initial moments."""
    nnx = pytest.importorskip("flax.nnx")
    keep = Matching(missing="keep", unexpected="ignore")

    def state(optimizer: Any, head: str = "head") -> Any:
        shape = (len(head), 2)
        model = nnx.Dict({name: nnx.Param(jnp.ones(shape)) for name in ("body", head)})
        model["body"] = nnx.Param(jnp.ones(2))
        return nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    saved = state(ADAM)
    saved.opt_state[0].mu["body"][...] = jnp.full(2, 7.0)
    ckptcore.save(tmp_path / "c", {"opt": saved, "step": 3})
    momentum = optax.sgd(1e-3, momentum=0.9)
    for matching in (Matching(), keep):
        with pytest.raises(
            TreeMismatchError, match="a state with trace is requested, one with count, mu, nu"
        ) as caught:
            ckptcore.load_into(tmp_path / "c", {"opt": state(momentum), "step": 0}, matching=matching)
        assert "matching=" not in str(caught.value) and "use PLACEHOLDER" in str(caught.value)
    assert ckptcore.load_into(tmp_path / "c", {"opt": PLACEHOLDER, "step": 0})["step"] == 3
    other = state(ADAM, "another")
    ckptcore.load_into(tmp_path / "c", {"opt": other, "step": 0}, matching=keep)
    assert (other.opt_state[0].mu["body"][...] == 7.0).all()


def test_a_request_without_any_stored_leaf(tmp_path: Path) -> None:
    """The error proposes no option with which the load would return the values of the caller."""
    ckptcore.save(tmp_path / "c", {"params": PARAMETERS})
    text = refused(tmp_path / "c", {"w": jnp.ones(3), "b": jnp.ones(2)})
    assert "No requested leaf is stored" in text and "matching=" not in text


def test_a_move_is_divided_if_other_parts_are_below_its_path() -> None:
    requested = {0: ("x", "a", 0), 1: ("x", "a", 1), 2: ("x", "b", 0), 3: ("x", "b", 1)}
    stored = {10: ("a", 0), 11: ("a", 1), 12: ("b", 0), 13: ("b", 1)}
    moves = find_moves(requested, stored, [("c", 0)], lambda position, number: True)
    assert {(move.requested, move.stored) for move in moves} == {(("x", "a"), ("a",)), (("x", "b"), ("b",))}
    (move,) = find_moves(requested, stored, [], lambda position, number: True)
    assert (move.requested, move.stored) == (("x",), ())


def test_whole_parts_are_the_largest_with_all_leaves_chosen() -> None:
    paths = [("a", 0), ("a", 1), ("b", "c", 0), ("b", "c", 1), ("b", "d")]
    assert whole_parts(paths, [0, 1, 2, 3]) == [("a",), ("b", "c")]
    assert whole_parts(paths, range(5)) == [()]
    assert whole_parts(paths, []) == []


def test_parts_that_move_to_the_paths_of_other_parts(tmp_path: Path) -> None:
    """The renames are in an order in which no two parts are ever merged."""
    saved = stepped(optax.chain(ADAM, optax.trace(0.9)))
    request = optax.chain(optax.clip_by_global_norm(1.0), ADAM, optax.trace(0.9)).init(PARAMETERS)
    ckptcore.save(tmp_path / "c", {"p": PARAMETERS, "o": saved})
    text = refused(tmp_path / "c", {"p": PARAMETERS, "o": request})
    loaded = followed(tmp_path / "c", {"p": PARAMETERS, "o": request}, text)["o"]
    assert_equal(loaded, (optax.EmptyState(), *saved))


@pytest.mark.parametrize(
    ("stored", "requested"),
    [
        ({"a": {"w": 2, "b": 3}}, {"c": {"w": 5, "b": 7}}),  # other shapes
        ({"a": {"w": 2, "b": 3}, "b": {"w": 2, "b": 3}}, {"d": {"w": 2, "b": 3}, "c": {"w": 2, "b": 3}}),  # ambiguous
        ({"a": {"w": 2, "b": 3}, "b": {"w": 2, "b": 3}}, {"d": {"w": 2, "b": 3}}),
        ({"x/y*": {"w": 2, "b": 3}}, {"a{b}": {"w": 2, "b": 3}}),  # characters of patterns
    ],
)
def test_transforms_that_may_be_wrong_are_not_proposed(tmp_path: Path, stored: Any, requested: Any) -> None:
    saved, request = (jax.tree.map(lambda size: np.ones(size), tree) for tree in (stored, requested))
    ckptcore.save(tmp_path / "c", saved)
    text = refused(tmp_path / "c", request)
    assert "moved" not in text and "missing: " in text and "unexpected: " in text


def test_a_requested_none_does_not_count_as_stored(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"params": {"w": np.ones(3)}})
    text = refused(tmp_path / "c", {"weight": np.ones(3), "bias": None})
    assert "No requested leaf is stored" in text and "matching=" not in text


def test_many_renamed_layers_are_compared_at_once(tmp_path: Path) -> None:
    """Each requested leaf is compared with few stored leaves, however many there are."""
    compared = 0

    def fits(position: int, number: int) -> bool:
        nonlocal compared
        compared += 1
        return True

    requested = {i: (f"block_{i // 2}", "wb"[i % 2]) for i in range(4000)}
    stored = {i: (f"layer_{i // 2}", "wb"[i % 2]) for i in range(4000)}
    assert find_moves(requested, stored, [("other", i) for i in range(4000)], fits) == []
    assert compared == 0
    nested = {i: ("blocks", *path) for i, path in requested.items()}
    (move,) = find_moves(nested, {i: ("layers", *path) for i, path in requested.items()}, [], fits)
    assert len(move.pairs) == 4000 and compared == 4000


def test_too_many_moved_parts_are_not_listed() -> None:
    """The time to order the moves is cubic in their number, and the text would be too long."""
    for count, moves in ((20, 20), (1000, 0)):
        stored = {i: (f"w{i}",) for i in range(count)}
        requested = {i: ("model", *path) for i, path in stored.items()}
        assert len(find_moves(requested, stored, [("step",)], lambda position, number: True)) == moves


def test_the_text_shows_only_some_of_many_transforms(tmp_path: Path) -> None:
    """If the caller passes the transforms that are shown, the next error shows the others."""
    saved, state = ({f"w{i}": np.full(2, value) for i in range(8)} for value in (1, 0))
    ckptcore.save(tmp_path / "c", {**saved, "step": 3})
    text = refused(tmp_path / "c", {"model": state, "step": 0})
    assert text.count("Rename") == 6 and "and a Rename for each of 3 more" in text
    transforms = eval(text.partition("transforms=")[2].partition("]")[0] + "]")
    with pytest.raises(TreeMismatchError) as caught:
        ckptcore.load(tmp_path / "c", {"model": state, "step": 0}, transforms=transforms)
    transforms += eval(str(caught.value).partition("transforms=")[2].partition("]")[0] + "]")
    assert len(transforms) == 8
    loaded = ckptcore.load(tmp_path / "c", {"model": state, "step": 0}, transforms=transforms)
    assert loaded["step"] == 3 and all(map(np.array_equal, loaded["model"].values(), saved.values()))


@pytest.mark.parametrize(("optimizer", "moves"), [("sgd", 0), ("adam_1", 1)])
def test_variables_of_another_optimizer_of_keras(optimizer: str, moves: int) -> None:
    """The learning rate and the moments of one optimizer class are never loaded into another class."""
    names = ("iteration", "learning_rate", "kernel_momentum", "bias_momentum")
    stored = {i: ("model", "optimizer_variables", "adam", name) for i, name in enumerate(names)}
    requested = {i: ("model", "optimizer_variables", optimizer, name) for i, name in enumerate(names)}
    assert len(find_moves(requested, stored, [("model", "w")], lambda position, number: True)) == moves


@pytest.mark.parametrize(("depth", "moves"), [(0, 0), (1, 1)])
def test_a_part_with_many_other_variables_is_not_moved(depth: int, moves: int) -> None:
    """Two lists of variables with only a few common names differ. Below layers, common names are enough."""
    below = [("layer",) * depth + (name,) for name in "abcdef"]
    stored = {i: ("old", *path) for i, path in enumerate(below)}
    requested = {i: ("new", *path) for i, path in enumerate(below[:3])}
    assert len(find_moves(requested, stored, [], lambda position, number: True)) == moves
