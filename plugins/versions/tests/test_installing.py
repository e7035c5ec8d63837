"""A version is written into weights of every framework, and only what changed since the last write."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from ckptcore_versions import Follower, Version, follow
from ckptcore_versions.following import installing
from ckptcore_versions.following.follower import FOLLOWED_NAMES

import ckptcore
from ckptcore import ShardedArray
from ckptcore.builtin.sharded_arrays import ArrayShard
from ckptcore.errors import TargetUndefinedError, TreeMismatchError
from ckptcore.model import Box
from plugins.versions.tests.followed import Published, first_weights

MATRIX_BYTES = 600 * 1000 * 4
ALL_BYTES = MATRIX_BYTES + 5 * 2 + 8


@pytest.fixture
def published(tmp_path: Path) -> Iterator[Published]:
    """Return a directory with one version."""
    with Published(tmp_path / "weights") as versions:
        versions.publish(1)
        yield versions


@pytest.fixture
def follower(published: Published, tmp_path: Path) -> Iterator[Follower]:
    """Return a follower that has yielded no version."""
    with follow(published.location, cache=tmp_path / "cache", timeout=0) as versions:
        yield versions


def after(published: Published, follower: Follower, number: int) -> Version:
    """Publish a version, and return it from the follower."""
    if number not in published.weights:
        published.publish(number)
    version = follower.next_version(0)
    assert version is not None and version.number == number
    return version


def zeros(value: Any) -> Any:
    """Return weights to write into."""
    return {key: zeros(inner) for key, inner in value.items()} if isinstance(value, dict) else np.zeros_like(value)


def test_only_changed_boxes_are_written_into_arrays(published: Published, follower: Follower) -> None:
    weights = zeros(first_weights())
    matrix = weights["layers"]["0"]["weight"]
    version = after(published, follower, 1)
    assert version.load_into(weights) is weights
    assert version.written_bytes == ALL_BYTES
    version = after(published, follower, 2)
    matrix[599] = 7  # outside of the boxes that changed: not allowed
    version.load_into(weights)
    assert weights["layers"]["0"]["weight"] is matrix
    assert 4000 + 8 <= version.written_bytes <= (1 << 20) + 8
    np.testing.assert_array_equal(matrix[:599], published.weights[2]["layers"]["0"]["weight"][:599])
    assert (matrix[599] == 7).all() and weights["scale"] == 2
    version.load_into(weights)
    assert version.written_bytes == 0


def test_what_changed_in_versions_that_were_not_written_is_written_later(
    published: Published, follower: Follower
) -> None:
    weights = zeros(first_weights())
    after(published, follower, 1).load_into(weights)
    after(published, follower, 2)
    version = after(published, follower, 599)
    version.load_into(weights)
    assert version.written_bytes < ALL_BYTES
    np.testing.assert_array_equal(weights["layers"]["0"]["weight"], published.weights[599]["layers"]["0"]["weight"])


def test_other_arrays_in_the_same_dict_are_written_whole(published: Published, follower: Follower) -> None:
    weights = zeros(first_weights())
    after(published, follower, 1).load_into(weights)
    weights["layers"]["0"]["weight"] = np.zeros((600, 1000), np.float32)
    version = after(published, follower, 2)
    version.load_into(weights)
    np.testing.assert_array_equal(weights["layers"]["0"]["weight"], published.weights[2]["layers"]["0"]["weight"])
    assert version.written_bytes == MATRIX_BYTES + 8


def test_an_older_version_is_written_whole_and_so_is_the_next_one(published: Published, follower: Follower) -> None:
    weights = zeros(first_weights())
    first = after(published, follower, 1)
    second = after(published, follower, 2)
    second.load_into(weights)
    first.load_into(weights)
    np.testing.assert_array_equal(weights["layers"]["0"]["weight"], published.weights[1]["layers"]["0"]["weight"])
    second.load_into(weights)
    assert second.written_bytes == ALL_BYTES
    np.testing.assert_array_equal(weights["layers"]["0"]["weight"], published.weights[2]["layers"]["0"]["weight"])


def test_a_write_that_fails_leaves_a_mixture_and_the_next_one_writes_everything(
    published: Published, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = zeros(first_weights())
    after(published, follower, 1).load_into(weights)
    version = after(published, follower, 2)

    def fail(destination: Any, source: Any) -> None:
        raise MemoryError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(installing, "copy_elements", fail)
        with pytest.raises(TargetUndefinedError, match="version 2 was written in part: .* mixture of two versions"):
            version.load_into(weights)
    version.load_into(weights)
    assert version.written_bytes == ALL_BYTES


def test_weights_that_do_not_fit_are_refused_before_anything_changes(published: Published, follower: Follower) -> None:
    weights = {**zeros(first_weights()), "bias": np.zeros(6)}
    with pytest.raises(TreeMismatchError, match="bias") as refused:
        after(published, follower, 1).load_into(weights)
    assert "pass matching=" not in str(refused.value), "load_into of a version has no such option"
    assert not weights["layers"]["0"]["weight"].any()


def test_weights_that_need_more_than_the_cache_has_are_refused_before_anything_changes(
    published: Published, tmp_path: Path
) -> None:
    part = ArrayShard(Box((0, 0), (10, 1000)))
    like = {**first_weights(), "layers": {"0": {"weight": ShardedArray((600, 1000), np.float32, [part])}}}
    weights = zeros(first_weights())
    with follow(published.location, cache=tmp_path / "cache", like=like) as follower:
        version = after(published, follower, 1)
        with pytest.raises(TreeMismatchError, match="which the cache does not have"):
            version.load_into(weights)
    assert not weights["bias"].any() and not weights["scale"].any()


class Model(torch.nn.Module):
    """A module with the tree of the versions in `published_model`, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(1000, 600, dtype=torch.bfloat16)
        self.output = torch.nn.Linear(1000, 600, bias=False, dtype=torch.bfloat16)
        self.output.weight = self.inner.weight


def test_a_module_is_written_in_place(tmp_path: Path) -> None:
    trained, served = Model(), Model()
    parameter = served.inner.weight
    with (
        ckptcore.Checkpointer(tmp_path / "weights", step_names=FOLLOWED_NAMES) as checkpointer,
        follow(tmp_path / "weights", cache=tmp_path / "cache") as follower,
    ):
        for number in range(3):
            with torch.no_grad():
                trained.inner.weight[number] += 1
            checkpointer.save_blocking(number, trained)
            version = follower.next_version(0)
            assert version is not None
            assert version.load_into(served) is served
            assert version.written_bytes <= (1 << 20) or number == 0
            assert torch.equal(served.inner.weight, trained.inner.weight) and served.inner.weight is parameter
            assert torch.equal(served.inner.bias, trained.inner.bias)
            assert served.output.weight is served.inner.weight
        assert version is not None and set(version.arrays) == {"inner.weight", "inner.bias", "output.weight"}
        del served, parameter
        gc.collect()
        assert not version._installer._known._of_roots


def test_arrays_of_jax_are_replaced_in_their_containers_if_they_changed(
    published: Published, follower: Follower
) -> None:
    weights: Any = {
        "layers": {"0": {"weight": jnp.zeros((600, 1000))}},
        "bias": jnp.zeros(5, jnp.bfloat16),
        "scale": np.zeros((), np.float64),
    }
    after(published, follower, 1).load_into(weights)
    bias, matrix = weights["bias"], weights["layers"]["0"]["weight"]
    after(published, follower, 2).load_into(weights)
    assert weights["bias"] is bias and weights["layers"]["0"]["weight"] is not matrix
    np.testing.assert_array_equal(weights["layers"]["0"]["weight"], published.weights[2]["layers"]["0"]["weight"])
    np.testing.assert_array_equal(matrix, published.weights[1]["layers"]["0"]["weight"])


class Layers(NamedTuple):
    """A container that cannot be changed."""

    layers: Any
    bias: Any
    scale: Any


def test_a_new_value_is_returned_if_a_container_cannot_be_changed(published: Published, follower: Follower) -> None:
    weights: Any = Layers(
        {"0": {"weight": jnp.zeros((600, 1000))}}, jnp.zeros(5, jnp.bfloat16), np.zeros((), np.float64)
    )
    first = after(published, follower, 1).load_into(weights)
    assert isinstance(first, Layers) and not weights.bias.any()
    version = after(published, follower, 2)
    second: Any = version.load_into(first)
    assert second.bias is first.bias
    np.testing.assert_array_equal(second.layers["0"]["weight"], published.weights[2]["layers"]["0"]["weight"])
    assert second.scale == 2


def test_arrays_that_are_not_contiguous_are_written(published: Published, follower: Follower) -> None:
    weights = zeros(first_weights())
    weights["layers"]["0"]["weight"] = np.zeros((1000, 600), np.float32).T
    for number in (1, 2):
        after(published, follower, number).load_into(weights)
        np.testing.assert_array_equal(
            weights["layers"]["0"]["weight"], published.weights[number]["layers"]["0"]["weight"]
        )


def test_weights_are_written_while_the_next_version_is_prepared(published: Published, follower: Follower) -> None:
    weights = zeros(first_weights())
    version = after(published, follower, 1)
    newer = after(published, follower, 2)
    version.load_into(weights)
    np.testing.assert_array_equal(weights["layers"]["0"]["weight"], published.weights[1]["layers"]["0"]["weight"])
    newer.load_into(weights)
    np.testing.assert_array_equal(weights["layers"]["0"]["weight"], published.weights[2]["layers"]["0"]["weight"])


def test_shards_of_jax_are_read_and_written(published: Published, tmp_path: Path) -> None:
    devices = jax.devices()
    assert len(devices) > 1
    spec: Any = jax.sharding.PartitionSpec
    by_rows = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices), ("x",)), spec("x"))
    replicated = jax.sharding.NamedSharding(by_rows.mesh, spec())
    rows = 600 // len(devices) * len(devices)
    assert rows == 600
    weights: Any = {
        "layers": {"0": {"weight": jax.device_put(jnp.zeros((600, 1000)), by_rows)}},
        "bias": jax.device_put(jnp.zeros(5, jnp.bfloat16), replicated),
        "scale": np.zeros((), np.float64),
    }
    with follow(published.location, cache=tmp_path / "cache", like=weights, timeout=0) as follower:
        for number in (1, 2):
            version = after(published, follower, number)
            weights = version.load_into(weights)
            written = weights["layers"]["0"]["weight"]
            assert written.sharding == by_rows
            np.testing.assert_array_equal(written, published.weights[number]["layers"]["0"]["weight"])
        kept = version.arrays["layers.0.weight"]
        assert isinstance(kept, ckptcore.ShardedArray) and len(kept.shards) == len(devices)
        assert version.arrays["bias"].shape == (5,)
