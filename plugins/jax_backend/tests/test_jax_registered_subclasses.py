"""Registered subclasses of Python containers keep their registered state in addition to their items."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ckptcore


class Extended(dict[str, Any]):
    """A dict with an array in addition to its items."""

    extra: Any = None


def _take_apart(value: Extended) -> tuple[tuple[tuple[Any, Any], ...], None]:
    return ((jax.tree_util.GetAttrKey("items"), dict(value)), (jax.tree_util.GetAttrKey("extra"), value.extra)), None


def _put_together(static: None, children: Any) -> Extended:
    made = Extended(children[0])
    made.extra = children[1]
    return made


jax.tree_util.register_pytree_with_keys(Extended, _take_apart, _put_together)


def extended(value: float) -> Extended:
    return _put_together(None, ({"w": jnp.full(2, value)}, jnp.full(3, value)))


def test_registered_state_of_a_dict_is_saved(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"state": extended(5.0)})
    loaded = ckptcore.load(tmp_path / "c", {"state": extended(0.0)})["state"]
    assert type(loaded) is Extended
    assert np.all(loaded["w"] == 5) and np.all(loaded.extra == 5)


def test_it_is_replaced_whole_by_load_into(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"state": extended(5.0)})
    target = {"state": extended(0.0)}
    ckptcore.load_into(tmp_path / "c", target)
    assert np.all(target["state"].extra == 5) and np.all(target["state"]["w"] == 5)
