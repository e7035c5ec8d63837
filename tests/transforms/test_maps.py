"""Ready-made maps give what other software expects, and take it back bit-equal."""

# mypy: allow-untyped-calls

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1  # type: ignore[import-untyped]  # it has no types
from safetensors.numpy import load_file

import ckptcore
from ckptcore.errors import TransformError
from ckptcore.testing import assert_same_tree
from ckptcore.transforms import Transform, inverse
from ckptcore.transforms.maps import MAPS, bert_to_scanned, find_map, llama_to_maxtext, llama_to_scanned
from examples.minilm.pretrained import model_directory

LAYERS, EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCABULARY = 3, 16, 4, 2, 16, 24, 66


def _llama(*, tied: bool = False, dtype: str = "float32") -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, EMBED),
        "model.norm.weight": (EMBED,),
    }
    if not tied:
        shapes["lm_head.weight"] = (VOCABULARY, EMBED)
    for layer in range(LAYERS):
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"model.layers.{layer}.self_attn.{part}_proj.weight"] = (heads * HEAD_DIM, EMBED)
        shapes[f"model.layers.{layer}.self_attn.o_proj.weight"] = (EMBED, HEADS * HEAD_DIM)
        for part in ("gate", "up"):
            shapes[f"model.layers.{layer}.mlp.{part}_proj.weight"] = (MLP, EMBED)
        shapes[f"model.layers.{layer}.mlp.down_proj.weight"] = (EMBED, MLP)
        for name in ("input", "post_attention"):
            shapes[f"model.layers.{layer}.{name}_layernorm.weight"] = (EMBED,)
    return {
        name: rng.normal(size=shape).astype(ckptcore.AbstractArray((), dtype).dtype) for name, shape in shapes.items()
    }


def _there_and_back(state: dict[str, Any], transforms: list[Transform], tmp_path: Path) -> Any:
    """What a map makes, which is then taken back."""
    ckptcore.save(tmp_path / "first", state)
    made = ckptcore.load(tmp_path / "first", transforms=transforms)
    ckptcore.save(tmp_path / "second", made)
    back = ckptcore.load(tmp_path / "second", transforms=inverse(transforms))
    assert sorted(back) == sorted(state)
    assert_same_tree({name: back[name] for name in state}, state)
    return made


@pytest.mark.parametrize("tied", [False, True])
def test_llama_is_scanned(tied: bool, tmp_path: Path) -> None:
    state = _llama(tied=tied, dtype="bfloat16")
    made = _there_and_back(state, llama_to_scanned(), tmp_path)
    kernel = made["layers"]["mlp"]["gate_proj"]["kernel"]
    expected = np.stack([state[f"model.layers.{layer}.mlp.gate_proj.weight"].T for layer in range(LAYERS)])
    assert_same_tree(kernel, expected)
    assert made["layers"]["input_layernorm"]["scale"].shape == (LAYERS, EMBED)
    assert ("lm_head" in made) != tied


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_llama_is_what_maxtext_has(dtype: str, tmp_path: Path) -> None:
    state = _llama(dtype=dtype)
    made = _there_and_back(state, llama_to_maxtext(HEAD_DIM), tmp_path)["params"]
    layers, half = made["decoder"]["layers"], HEAD_DIM // 2
    attention = layers["self_attention"]
    assert attention["query"]["kernel"].shape == (EMBED, LAYERS, HEADS, HEAD_DIM)
    assert attention["key"]["kernel"].shape == (EMBED, LAYERS, KV_HEADS, HEAD_DIM)
    assert attention["out"]["kernel"].shape == (HEADS, LAYERS, HEAD_DIM, EMBED)
    assert layers["mlp"]["wi_0"]["kernel"].shape == (EMBED, LAYERS, MLP)
    assert layers["mlp"]["wo"]["kernel"].shape == (MLP, LAYERS, EMBED)
    assert layers["pre_self_attention_layer_norm"]["scale"].shape == (EMBED, LAYERS)
    assert made["decoder"]["logits_dense"]["kernel"].shape == (EMBED, VOCABULARY)
    assert made["token_embedder"]["embedding"].shape == (VOCABULARY, EMBED)
    for layer in range(LAYERS):
        stored = state[f"model.layers.{layer}.self_attn.q_proj.weight"].T.reshape(EMBED, HEADS, HEAD_DIM)
        query = attention["query"]["kernel"][:, layer].astype(np.float32) * np.float32(math.sqrt(HEAD_DIM))
        assert np.array_equal(query[..., ::2], stored[..., :half].astype(np.float32))
        assert np.array_equal(query[..., 1::2], stored[..., half:].astype(np.float32))
        out = state[f"model.layers.{layer}.self_attn.o_proj.weight"].T.reshape(HEADS, HEAD_DIM, EMBED)
        assert_same_tree(np.ascontiguousarray(attention["out"]["kernel"][:, layer]), out)
        down = state[f"model.layers.{layer}.mlp.down_proj.weight"].T
        assert_same_tree(np.ascontiguousarray(layers["mlp"]["wo"]["kernel"][:, layer]), np.ascontiguousarray(down))


def test_maps_are_found_by_name_and_the_other_way_round() -> None:
    assert find_map("bert-to-scanned") == bert_to_scanned()
    assert find_map("maxtext-to-llama", 128) == inverse(llama_to_maxtext(128))
    with pytest.raises(TransformError, match="there is no map 'gpt-to-scanned'; there are bert-to-scanned"):
        find_map("gpt-to-scanned")
    with pytest.raises(TransformError, match="needs the elements of a head"):
        find_map("llama-to-maxtext")
    with pytest.raises(TransformError, match="an even number"):
        find_map("llama-to-maxtext", 7)
    for name in MAPS:
        assert find_map(name, 64)


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_minilm_goes_to_a_scanned_jax_tree_to_orbax_and_back_bit_equal(tmp_path: Path) -> None:
    original = load_file(model_directory() / "model.safetensors")
    scanned = bert_to_scanned()
    told = ckptcore.metadata(model_directory() / "model.safetensors", transforms=scanned)
    on_device = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), told.abstract)
    with jax.enable_x64(True):  # position_ids are int64
        tree = ckptcore.load(model_directory() / "model.safetensors", on_device, transforms=scanned)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))
    assert tree["encoder"]["layers"]["attention"]["query"]["kernel"].shape == (6, 384, 384)
    ckptcore.save(tmp_path / "orbax", tree, layout="ocdbt")
    theirs = v1.load(tmp_path / "orbax")
    assert np.array_equal(theirs["pooler"]["kernel"], original["pooler.dense.weight"].T)
    ckptcore.convert(tmp_path / "orbax", tmp_path / "back", transforms=inverse(scanned))
    back = ckptcore.load(tmp_path / "back")
    assert sorted(back) == sorted(original)
    assert_same_tree({name: back[name] for name in original}, original)
    (written,) = (tmp_path / "back").glob("*.safetensors")
    assert_same_tree(
        {name: array for name, array in sorted(load_file(written).items())}, dict(sorted(original.items()))
    )
