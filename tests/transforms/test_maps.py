"""Ready-made maps produce the format of other software. Their inverses restore the original bit for bit."""

# mypy: allow-untyped-calls

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ckptcore_jax.testing import enable_x64
from ckptcore_testing import assert_same_tree
from ckptcore_transforms import Drop, Transform, inverse
from ckptcore_transforms.maps import (
    MAPS,
    bert_to_scanned,
    find_map,
    llama_to_maxtext,
    llama_to_scanned,
    qwen_to_maxtext,
)
from orbax.checkpoint import v1  # type: ignore[import-untyped]  # it has no types
from safetensors.numpy import load_file

import ckptcore
from ckptcore.errors import TransformError
from examples.minilm.pretrained import model_directory

LAYERS, EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCABULARY = 3, 16, 4, 2, 16, 24, 66


def _llama(
    *, tied: bool = False, dtype: str = "float32", head_dim: int = HEAD_DIM, biases: str = "", norms: bool = False
) -> dict[str, Any]:
    """Return a Llama with the names of Transformers. `biases` are the first letters of projections with a bias."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, EMBED),
        "model.norm.weight": (EMBED,),
    }
    if not tied:
        shapes["lm_head.weight"] = (VOCABULARY, EMBED)
    for layer in range(LAYERS):
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"model.layers.{layer}.self_attn.{part}_proj.weight"] = (heads * head_dim, EMBED)
        shapes[f"model.layers.{layer}.self_attn.o_proj.weight"] = (EMBED, HEADS * head_dim)
        for part in ("gate", "up"):
            shapes[f"model.layers.{layer}.mlp.{part}_proj.weight"] = (MLP, EMBED)
        shapes[f"model.layers.{layer}.mlp.down_proj.weight"] = (EMBED, MLP)
        for name in ("input", "post_attention"):
            shapes[f"model.layers.{layer}.{name}_layernorm.weight"] = (EMBED,)
    for name, (outputs, *inputs) in list(shapes.items()):
        if inputs and name.removesuffix("_proj.weight").rpartition(".")[2][0] in biases and "_proj" in name:
            shapes[name.removesuffix("weight") + "bias"] = (outputs,)
        if norms and name.endswith(("q_proj.weight", "k_proj.weight")):
            shapes[name.replace("proj", "norm")] = (head_dim,)
    return {
        name: rng.normal(size=shape).astype(ckptcore.AbstractArray((), dtype).dtype) for name, shape in shapes.items()
    }


def _round_trip(state: dict[str, Any], transforms: list[Transform], tmp_path: Path) -> Any:
    """Apply a map and its inverse, and compare. Return the mapped tree."""
    ckptcore.save(tmp_path / "first", state)
    made = ckptcore.load(tmp_path / "first", transforms=transforms)
    ckptcore.save(tmp_path / "second", made)
    back = ckptcore.load(tmp_path / "second", transforms=inverse(transforms))
    assert sorted(back) == sorted(state)
    assert_same_tree({name: back[name] for name in state}, state)
    return made


@pytest.mark.parametrize("tied", [False, True])
def test_llama_maps_to_a_scanned_tree(tied: bool, tmp_path: Path) -> None:
    state = _llama(tied=tied, dtype="bfloat16")
    made = _round_trip(state, llama_to_scanned(), tmp_path)
    kernel = made["layers"]["mlp"]["gate_proj"]["kernel"]
    expected = np.stack([state[f"model.layers.{layer}.mlp.gate_proj.weight"].T for layer in range(LAYERS)])
    assert_same_tree(kernel, expected)
    assert made["layers"]["input_layernorm"]["scale"].shape == (LAYERS, EMBED)
    assert ("lm_head" in made) != tied


@pytest.mark.parametrize("prefix", ["", "language_model.", "vlm.text."])
@pytest.mark.parametrize(("biases", "norms"), [("qkv", False), ("qkvogud", False), ("", True)])
def test_models_like_llama_map_to_a_scanned_tree(biases: str, norms: bool, prefix: str, tmp_path: Path) -> None:
    """The models are Qwen 2, Llama with all biases, and Qwen 3, each alone or as part of another model."""
    state = {prefix + name: array for name, array in _llama(biases=biases, norms=norms).items()}
    if prefix:
        state["vision.layers.0.kernel"] = np.ones((2, 3))
    made = _round_trip(state, llama_to_scanned(prefix), tmp_path)
    layer = f"{prefix}model.layers.1"
    if prefix:
        assert_same_tree(made["vision.layers.0.kernel"], np.ones((2, 3)))
    for key in prefix.split(".")[:-1]:
        made = made[key]
    assert sorted(made) == ["embed_tokens", "layers", "lm_head", "norm"], "nothing stays under its first name"
    assert_same_tree(made["lm_head"]["kernel"], np.ascontiguousarray(state[f"{prefix}lm_head.weight"].T))
    key_projection = made["layers"]["self_attn"]["k_proj"]
    assert key_projection["kernel"].shape == (LAYERS, EMBED, KV_HEADS * HEAD_DIM)
    if "k" in biases:
        assert_same_tree(key_projection["bias"][1], state[f"{layer}.self_attn.k_proj.bias"])
    if "g" in biases:
        assert_same_tree(made["layers"]["mlp"]["gate_proj"]["bias"][1], state[f"{layer}.mlp.gate_proj.bias"])
    if norms:
        assert_same_tree(made["layers"]["self_attn"]["q_norm"]["scale"][1], state[f"{layer}.self_attn.q_norm.weight"])


def _bert(layers: int = 12) -> dict[str, Any]:
    """Return an encoder with the names of Transformers."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        f"embeddings.{table}_embeddings.weight": (9, EMBED) for table in ("word", "position")
    }
    dense = {
        "attention.self.query": (EMBED, EMBED),
        "attention.self.key": (EMBED, EMBED),
        "attention.self.value": (EMBED, EMBED),
    }
    dense |= {
        "attention.output.dense": (EMBED, EMBED),
        "intermediate.dense": (MLP, EMBED),
        "output.dense": (EMBED, MLP),
    }
    for layer in range(layers):
        for name, shape in dense.items():
            shapes |= {f"encoder.layer.{layer}.{name}.weight": shape, f"encoder.layer.{layer}.{name}.bias": shape[:1]}
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= dict.fromkeys(
                [f"encoder.layer.{layer}.{name}.{parameter}" for parameter in ("weight", "bias")], (EMBED,)
            )
    shapes |= dict.fromkeys([f"embeddings.LayerNorm.{parameter}" for parameter in ("weight", "bias")], (EMBED,))
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("prefix", ["bert.", "roberta.", "model.bert."])
def test_an_encoder_maps_to_a_scanned_tree_and_task_heads_are_kept(prefix: str, tmp_path: Path) -> None:
    state: dict[str, Any] = {prefix + name: array for name, array in _bert().items()}
    heads = {"cls.predictions.transform.dense.weight": np.ones((3, 2)), "classifier/kernel": np.ones((3, 2))}
    made = _round_trip({**state, **heads}, bert_to_scanned(prefix), tmp_path)
    assert_same_tree({name: made.pop(name) for name in heads}, heads)
    for key in prefix.split(".")[:-1]:
        made = made[key]
    kernel = made["encoder"]["layers"]["intermediate"]["kernel"]
    expected = np.stack([state[f"{prefix}encoder.layer.{layer}.intermediate.dense.weight"].T for layer in range(12)])
    assert_same_tree(kernel, expected)
    with pytest.raises(TransformError, match="matches nothing"):
        ckptcore.load(tmp_path / "first", transforms=bert_to_scanned())


@pytest.mark.parametrize("prefix", ["bert", ".", "a..", "*.", "a/b.", "{x}."])
def test_invalid_prefixes_are_refused(prefix: str) -> None:
    for make in (
        bert_to_scanned,
        llama_to_scanned,
        partial(llama_to_maxtext, 64, "default"),
        partial(qwen_to_maxtext, 64),
    ):
        with pytest.raises(TransformError, match="is not a prefix of names"):
            make(prefix)


def test_maps_and_their_inverses_are_found_by_name() -> None:
    assert find_map("bert-to-scanned") == bert_to_scanned()
    assert find_map("maxtext-to-llama", 128, rope_type="default") == inverse(llama_to_maxtext(128, "default"))
    assert find_map("qwen-to-maxtext", 128, "text.") == qwen_to_maxtext(128, "text.")
    with pytest.raises(TransformError, match="unknown map 'gpt-to-scanned'. Maps: bert-to-scanned"):
        find_map("gpt-to-scanned")
    with pytest.raises(TransformError, match="requires head_dim: set the number of elements of a head"):
        find_map("llama-to-maxtext", rope_type="default")
    with pytest.raises(TransformError, match="requires rope_type: set 'default' or 'llama3.1'"):
        find_map("llama-to-maxtext", 64)
    with pytest.raises(TransformError, match="an even positive number"):
        find_map("qwen-to-maxtext", 7)
    given: dict[str, Any] = {"head_dim": 64, "rope_type": "llama3.1"}
    for name, known in MAPS.items():
        needed = {option: given[option] for option in known.needs}
        assert find_map(name, prefix="model.", **needed) != find_map(name, **needed)
        for option in given.keys() - known.needs:
            with pytest.raises(TransformError, match=f"does not use {option}="):
                find_map(name, **needed, **{option: given[option]})


def test_arrays_that_a_map_does_not_handle_are_refused(tmp_path: Path) -> None:
    """Old checkpoints of Llama have frequencies in each layer. If they are dropped, the report lists them."""
    state = _llama()
    odd = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for layer in range(LAYERS)}
    ckptcore.save(tmp_path / "old", {**state, **odd})
    with pytest.raises(
        TransformError, match=r"no transform handles .*inv_freq.* and 2 others: put Rename, or Drop .* ckptcore.copy"
    ):
        ckptcore.load(tmp_path / "old", transforms=llama_to_scanned())
    made = ckptcore.load(tmp_path / "old", transforms=[Drop("**.inv_freq"), *llama_to_scanned()])
    ckptcore.copy(
        tmp_path / "old", tmp_path / "new", layout="ocdbt", transforms=[Drop("**.inv_freq"), *llama_to_scanned()]
    )
    assert_same_tree(ckptcore.load(tmp_path / "new"), made)
    assert sorted(made) == ["embed_tokens", "layers", "lm_head", "norm"]
    ckptcore.save(tmp_path / "bert", {**_bert(), "encoder.layer.0.adapter.weight": np.ones((2, 2))})
    with pytest.raises(TransformError, match=r"no transform handles .*encoder\.layer\.0\.adapter\.weight"):
        ckptcore.load(tmp_path / "bert", transforms=bert_to_scanned())
    ckptcore.save(tmp_path / "scanned", {**made, "layers": {**made["layers"], "adapter": {"kernel": np.ones((2, 2))}}})
    with pytest.raises(TransformError, match="no transform handles .*layers/adapter/kernel"):
        ckptcore.load(tmp_path / "scanned", transforms=inverse(llama_to_scanned()))


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_minilm_has_an_exact_round_trip_through_a_scanned_tree_and_orbax(tmp_path: Path) -> None:
    original = load_file(model_directory() / "model.safetensors")
    scanned = bert_to_scanned()
    told = ckptcore.metadata(model_directory() / "model.safetensors", transforms=scanned)
    on_device = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), told.abstract)
    with enable_x64():  # position_ids are int64
        tree = ckptcore.load(model_directory() / "model.safetensors", on_device, transforms=scanned)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))
    assert tree["encoder"]["layers"]["attention"]["query"]["kernel"].shape == (6, 384, 384)
    ckptcore.save(tmp_path / "orbax", tree, layout="ocdbt")
    theirs = v1.load(tmp_path / "orbax")
    assert np.array_equal(theirs["pooler"]["kernel"], original["pooler.dense.weight"].T)
    ckptcore.copy(tmp_path / "orbax", tmp_path / "back", layout="safetensors", transforms=inverse(scanned))
    back = ckptcore.load(tmp_path / "back")
    assert sorted(back) == sorted(original)
    assert_same_tree({name: back[name] for name in original}, original)
    (written,) = (tmp_path / "back").glob("*.safetensors")
    assert_same_tree(dict(sorted(load_file(written).items())), dict(sorted(original.items())))
