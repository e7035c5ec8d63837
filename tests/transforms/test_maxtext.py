"""Maps to MaxText equal the result of MaxText's converter bit for bit, and the models compute the same logits."""

# mypy: allow-untyped-calls

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as orbax  # type: ignore[import-untyped]  # it has no types
import pytest
from ckptcore_testing import assert_same_tree
from ckptcore_transforms import Pad, Transform, describe, inverse
from ckptcore_transforms.maps import llama_to_maxtext, qwen_to_maxtext
from safetensors.numpy import load_file

import ckptcore
from ckptcore import PLACEHOLDER, ArrayShard, Context, ShardedArray
from ckptcore.context import IOOptions
from ckptcore.errors import TransformError
from ckptcore.model import Box
from ckptcore.results import LoadReport
from tests.transforms.maxtext import Family, maxtext_logits, maxtext_tree
from tests.transforms.published import EPSILON, HEAD_DIM, TOKENS, logits, publish

LLAMA = Family(pairs=False, scaled=True)
LLAMA_31 = Family(pairs=True, scaled=True)
QWEN = Family(pairs=False, scaled=False)

MODELS: dict[str, tuple[str, Family, Callable[[int, str], list[Transform]]]] = {
    "llama": ("Llama", LLAMA, lambda head_dim, prefix: llama_to_maxtext(head_dim, "default", prefix)),
    "llama 3.1": ("Llama", LLAMA_31, lambda head_dim, prefix: llama_to_maxtext(head_dim, "llama3.1", prefix)),
    "mistral": ("Mistral", LLAMA, lambda head_dim, prefix: llama_to_maxtext(head_dim, "default", prefix)),
    "qwen 2": ("Qwen2", QWEN, qwen_to_maxtext),
    "qwen 3": ("Qwen3", QWEN, qwen_to_maxtext),
}
"""By name: Hugging Face's class of models, how MaxText has it, and the map."""


def _assert_same(tree: Any, expected: Any) -> None:
    """Assert that two trees have equal keys in any order, and equal arrays bit for bit."""
    assert_same_tree(_in_order(tree), _in_order(expected))


def _in_order(node: Any) -> Any:
    return {key: _in_order(node[key]) for key in sorted(node)} if isinstance(node, dict) else np.ascontiguousarray(node)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_weights_equal_those_of_the_converter_and_have_an_exact_round_trip(
    name: str, tied: bool, dtype: str, tmp_path: Path
) -> None:
    kind, family, make = MODELS[name]
    publish(tmp_path / "published", kind, tied=tied, dtype=dtype)
    state = load_file(tmp_path / "published" / "model.safetensors")
    assert ("lm_head.weight" in state) != tied
    transforms = make(HEAD_DIM, "")
    made = ckptcore.load(tmp_path / "published", transforms=transforms)
    _assert_same(made, maxtext_tree(state, HEAD_DIM, family))
    ckptcore.save(tmp_path / "maxtext", made, layout="ocdbt")
    back = ckptcore.load(tmp_path / "maxtext", transforms=inverse(transforms))
    _assert_same(back, state)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Sharding info not provided:UserWarning")
def test_maxtext_restores_a_converted_checkpoint(tmp_path: Path) -> None:
    """The test makes the call of ``load_params_from_path`` in ``common/checkpointing.py``."""
    publish(tmp_path / "published", "Llama")
    ckptcore.copy(
        tmp_path / "published", tmp_path / "maxtext", layout="ocdbt", transforms=llama_to_maxtext(HEAD_DIM, "llama3.1")
    )
    expected = maxtext_tree(load_file(tmp_path / "published" / "model.safetensors"), HEAD_DIM, LLAMA_31)["params"]
    asked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), expected)
    reader = orbax.Checkpointer(orbax.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True))
    restore_args = {"params": orbax.checkpoint_utils.construct_restore_args(asked)}
    restored = reader.restore(
        tmp_path / "maxtext" / "state", item={"params": asked}, transforms={}, restore_args=restore_args
    )
    _assert_same(jax.tree.map(np.asarray, restored["params"]), expected)


@pytest.mark.parametrize("name", MODELS)
def test_maxtext_and_transformers_compute_equal_logits(name: str, tmp_path: Path) -> None:
    kind, family, make = MODELS[name]
    model = publish(tmp_path, kind)
    expected = logits(model)
    tree = ckptcore.load(tmp_path, transforms=make(HEAD_DIM, ""))
    assert np.allclose(maxtext_logits(tree, TOKENS, HEAD_DIM, family, EPSILON), expected, rtol=1e-3, atol=1e-4)
    other = Family(pairs=not family.pairs, scaled=family.scaled)
    wrong = maxtext_logits(tree, TOKENS, HEAD_DIM, other, EPSILON)
    assert np.abs(wrong - expected).max() > 0.01, "or no order of the elements of heads would show"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_queries_are_rounded_if_the_root_is_no_power_of_two(dtype: str, tmp_path: Path) -> None:
    """They are rounded like in MaxText's converter, once in each direction. All other arrays are restored exactly."""
    head_dim, root = 8, math.sqrt(8)
    publish(tmp_path / "published", "Llama", head_dim=head_dim, dtype=dtype)
    state = load_file(tmp_path / "published" / "model.safetensors")
    transforms = llama_to_maxtext(head_dim, "llama3.1")
    made = ckptcore.load(tmp_path / "published", transforms=transforms)
    _assert_same(made, maxtext_tree(state, head_dim, LLAMA_31))
    ckptcore.save(tmp_path / "maxtext", made)
    back = ckptcore.load(tmp_path / "maxtext", transforms=inverse(transforms))
    assert sorted(back) == sorted(state)
    for name, array in state.items():
        if "q_proj" in name:
            there = (array.astype(np.float32) * np.float32(1 / root)).astype(array.dtype)
            again = (there.astype(np.float32) * np.float32(root)).astype(array.dtype)
            assert_same_tree(back[name], again)
            assert not np.array_equal(again, array), "or nothing was rounded"
        else:
            assert_same_tree(back[name], array)


@pytest.mark.parametrize("name", MODELS)
def test_a_prefix_maps_a_part_of_another_model(name: str, tmp_path: Path) -> None:
    kind, family, make = MODELS[name]
    publish(tmp_path / "published", kind)
    state = load_file(tmp_path / "published" / "model.safetensors")
    whole = {f"text.{name}": array for name, array in state.items()} | {"vision.layers.0.kernel": np.ones((2, 3))}
    ckptcore.save(tmp_path / "whole", whole)
    made = ckptcore.load(tmp_path / "whole", transforms=make(HEAD_DIM, "text."))
    _assert_same(made, {**maxtext_tree(state, HEAD_DIM, family), "vision.layers.0.kernel": np.ones((2, 3))})
    ckptcore.save(tmp_path / "maxtext", made)
    _assert_same(ckptcore.load(tmp_path / "maxtext", transforms=inverse(make(HEAD_DIM, "text."))), whole)


SHARDED = {
    # Values are the axes that tensor parallelism divides: outputs of a kernel, which are the rows of the stored array.
    "token_embedder/embedding": 0,
    "decoder/logits_dense/kernel": 1,
    "decoder/layers/self_attention/query/kernel": 2,
    "decoder/layers/self_attention/key/kernel": 2,
    "decoder/layers/self_attention/value/kernel": 2,
    "decoder/layers/self_attention/out/kernel": 3,
    "decoder/layers/mlp/wi_0/kernel": 2,
    "decoder/layers/mlp/wi_1/kernel": 2,
    "decoder/layers/mlp/wo/kernel": 2,
}


def test_a_rank_reads_only_its_part_of_mapped_arrays(tmp_path: Path) -> None:
    embed, head_dim, mlp = 256, 32, 512
    rows = {"q_proj": 8 * head_dim, "k_proj": 4 * head_dim, "v_proj": 4 * head_dim, "gate_proj": mlp, "up_proj": mlp}
    rng = np.random.default_rng(0)
    state: dict[str, Any] = {"model.norm.weight": rng.random(embed, np.float32)}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = rng.random((512, embed), np.float32)
    for layer in range(3):
        of_layer = f"model.layers.{layer}"
        for part, outputs in rows.items():
            block = "self_attn" if part[0] in "qkv" else "mlp"
            state[f"{of_layer}.{block}.{part}.weight"] = rng.random((outputs, embed), np.float32)
        state[f"{of_layer}.self_attn.o_proj.weight"] = rng.random((embed, 8 * head_dim), np.float32)
        state[f"{of_layer}.mlp.down_proj.weight"] = rng.random((embed, mlp), np.float32)
        for norm in ("input", "post_attention"):
            state[f"{of_layer}.{norm}_layernorm.weight"] = rng.random(embed, np.float32)
    ckptcore.save(tmp_path / "c", state, context=Context(durability="none", io=IOOptions(checksums=False)))
    whole = maxtext_tree(state, head_dim, LLAMA_31)
    boxes: dict[tuple[str, ...], Box] = {}

    def asked(node: Any, path: tuple[str, ...]) -> Any:
        if isinstance(node, dict):
            return {key: asked(below, (*path, key)) for key, below in node.items()}
        if (axis := SHARDED.get("/".join(path[2:]))) is None:
            return PLACEHOLDER
        boxes[path] = Box.whole(node.shape).bands(axis, node.shape[axis] // 4)[1]
        return ShardedArray(node.shape, node.dtype, [ArrayShard(boxes[path])])

    report = LoadReport()
    transforms = llama_to_maxtext(head_dim, "llama3.1")
    loaded = ckptcore.load(tmp_path / "c", asked(whole, ()), transforms=transforms, report=report)
    assert len(boxes) == len(SHARDED)
    needed = 0
    for path, box in boxes.items():
        leaf: Any = loaded
        expected: Any = whole
        for key in path:
            leaf, expected = leaf[key], expected[key]
        (shard,) = leaf.shards
        assert np.array_equal(shard.elements, expected[box.slices])
        needed += shard.elements.nbytes
    assert needed <= report.bytes_read <= 1.1 * needed


def test_the_inverse_removes_the_padding_of_a_vocabulary(tmp_path: Path) -> None:
    """MaxText pads the embedding with rows of zeros, and a separate kernel of logits with columns of zeros."""
    publish(tmp_path / "published", "Qwen3")
    state = load_file(tmp_path / "published" / "model.safetensors")
    weights = "params/params"
    padded = [
        *qwen_to_maxtext(HEAD_DIM),
        Pad(f"{weights}/token_embedder/embedding", 128, stored=66),
        Pad(f"{weights}/decoder/logits_dense/kernel", 128, axis=1, stored=66),
    ]
    made = ckptcore.load(tmp_path / "published", transforms=padded)
    tree = made["params"]["params"]
    embedding, logits = tree["token_embedder"]["embedding"], tree["decoder"]["logits_dense"]["kernel"]
    assert embedding.shape == (128, 24) and logits.shape == (24, 128)
    assert not embedding[66:].any() and not logits[:, 66:].any()
    ckptcore.save(tmp_path / "maxtext", made)
    back = ckptcore.load(tmp_path / "maxtext", transforms=inverse(padded))
    _assert_same(back, state)


@pytest.mark.parametrize(
    ("kind", "transforms", "told"),
    [
        ("Qwen2", llama_to_maxtext(HEAD_DIM, "default"), r"model\.layers\.0\.self_attn\.k_proj\.bias.* and 8 others"),
        ("Qwen3", llama_to_maxtext(HEAD_DIM, "default"), r"model\.layers\.0\.self_attn\.k_norm\.weight.* and 5 others"),
        ("Llama", llama_to_maxtext(HEAD_DIM // 2, "default"), "heads of 16 elements: set head_dim to that"),
        ("Qwen3", qwen_to_maxtext(HEAD_DIM * 2), "heads of 16 elements: set head_dim to that"),
    ],
)  # fmt: skip
def test_model_of_another_family_is_refused(kind: str, transforms: list[Transform], told: str, tmp_path: Path) -> None:
    publish(tmp_path / "published", kind)
    with pytest.raises(TransformError, match=told):
        ckptcore.copy(tmp_path / "published", tmp_path / "made", layout="safetensors", transforms=transforms)
    assert not (tmp_path / "made").exists()
    right = llama_to_maxtext(HEAD_DIM, "default") if kind == "Llama" else qwen_to_maxtext(HEAD_DIM)
    ckptcore.copy(tmp_path / "published", tmp_path / "made", layout="safetensors", transforms=right)
    back = ckptcore.load(tmp_path / "made", transforms=inverse(right))
    _assert_same(back, ckptcore.load(tmp_path / "published"))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"head_dim": 8}, "heads of 8 elements"),
        ({"head_dim": "16"}, "heads of '16' elements"),
        ({"head_dim": None, "hidden_size": 96, "num_attention_heads": 4}, "heads of 24 elements"),
        ({"text_config": {"hidden_size": 96, "num_attention_heads": 4}}, "heads of 24 elements"),
        ({"hidden_size": 64, "num_attention_heads": 4}, None),
        ({"hidden_size": 64, "num_attention_heads": 0}, None),
        ({}, None),
    ],
)
def test_the_size_of_heads_is_checked_against_config(config: dict[str, Any], told: str | None, tmp_path: Path) -> None:
    publish(tmp_path, "Llama")
    (tmp_path / "config.json").write_text(json.dumps(config))
    transforms = llama_to_maxtext(HEAD_DIM, "default")
    if told is None:
        assert ckptcore.load(tmp_path, transforms=transforms)["params"]
        return
    with pytest.raises(TransformError, match=told):
        ckptcore.load(tmp_path, transforms=transforms)


def test_the_inverse_refuses_a_model_of_another_family(tmp_path: Path) -> None:
    publish(tmp_path / "published", "Qwen2")
    made = ckptcore.load(tmp_path / "published", transforms=qwen_to_maxtext(HEAD_DIM))
    ckptcore.save(tmp_path / "maxtext", {**made, "step": 3, "opt_state": {"mu": np.ones(2)}})
    back = ckptcore.load(tmp_path / "maxtext", transforms=inverse(qwen_to_maxtext(HEAD_DIM)))
    assert back["step"] == 3 and back["opt_state"]["mu"].shape == (2,), "other leaves are unchanged"
    with pytest.raises(TransformError, match=r"params/params/decoder/layers/self_attention/key/bias and 2 others"):
        ckptcore.load(tmp_path / "maxtext", transforms=inverse(llama_to_maxtext(HEAD_DIM, "default")))


def test_the_kind_of_rotary_embeddings_must_be_given() -> None:
    with pytest.raises(TransformError, match="rope_type='yarn'.*'default' or 'llama3.1'"):
        llama_to_maxtext(HEAD_DIM, "yarn")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(TypeError, match="rope_type"):
        llama_to_maxtext(HEAD_DIM)  # type: ignore[call-arg]  # wrong on purpose
    pairs, halves = (describe(llama_to_maxtext(HEAD_DIM, rope)) for rope in ("llama3.1", "default"))
    assert pairs != halves
