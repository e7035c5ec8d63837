"""Quantised Hugging Face checkpoints load with the values that their own tools restore. Mismatches are errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckptcore_transforms import (
    Dequantize,
    DequantizeAsConfigured,
    DequantizeMxfp4,
    IfPresent,
    Rename,
    Slice,
    Stack,
    Transform,
    Transpose,
    describe,
    inverse,
)
from ckptcore_transforms.maps import bert_to_scanned
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import ckptcore
from ckptcore import AbstractArray
from ckptcore.errors import CorruptCheckpointError, TransformError, TreeMismatchError
from plugins.transforms.tests.quantizing import (
    BLOCK,
    fp8_blocks,
    minilm,
    mxfp4_experts,
    per_row,
    per_tensor,
    publish,
    quantized,
    turned_back,
)

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def _same(array: Any, tensor: torch.Tensor) -> bool:
    """Return True if an array and a tensor have the same bits."""
    plain = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    bits: Any = tensor.contiguous().view(plain).numpy()
    return bool(array.shape == tuple(tensor.shape) and array.tobytes() == bits.tobytes())


def _times(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] = BLOCK) -> torch.Tensor:
    """Multiply values by the scales of their blocks, as the description of the format says."""
    wide = scales.float()
    for axis, size in enumerate(block):
        wide = wide.repeat_interleave(size, axis)
    return (values.float() * wide[: values.shape[0], : values.shape[1]]).to(torch.bfloat16)


def _quantized_minilm(quantize: Any, end: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return stored tensors and the expected weights."""
    stored, expected = {}, {}
    for name, weight in minilm().items():
        stored[name] = expected[name] = weight
        if quantized(name):
            stored[name], scales = quantize(weight)
            stored[name + end] = scales
            expected[name] = (
                (stored[name].float() * scales).to(torch.bfloat16)
                if quantize is not fp8_blocks
                else _times(stored[name], scales)
            )
    return stored, expected


@pytest.mark.parametrize("files", [1, 3])
def test_blocks_of_float8_equal_those_of_transformers(files: int, tmp_path: Path) -> None:
    stored, expected = _quantized_minilm(fp8_blocks, "_scale_inv")
    publish(tmp_path, stored, FP8, files)
    by_name: list[Transform] = [Dequantize("{name...}", "{name}_scale_inv", BLOCK)]
    for chain in (by_name, [DequantizeAsConfigured()]):
        loaded = ckptcore.load(tmp_path, transforms=chain)
        assert loaded.keys() == expected.keys()
        assert all(_same(loaded[name], expected[name]) for name in expected)
    owner = Fp8Dequantize(None)  # type: ignore[no-untyped-call]  # transformers has no types here
    name = "encoder.layer.0.intermediate.dense.weight"
    assert torch.equal(owner._dequantize_one(stored[name], stored[name + "_scale_inv"], torch.bfloat16), expected[name])
    worst = (expected[name].float() - minilm()[name].float()).abs().max()
    assert 0 < worst < 0.07 * minilm()[name].float().abs().max(), "the result is not close to the original weight"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_load_has_the_same_bits_as_a_load_of_torch(tmp_path: Path) -> None:
    """Torch's reader supports blocks of 128 x 128.

    MXFP4 is not compared: the reader of torch 2.13 plans with the stored extents, so it fills only a few columns.
    """
    stored, expected = _quantized_minilm(fp8_blocks, "_scale_inv")
    publish(tmp_path, stored, FP8, files=2)
    loaded = ckptcore.load(tmp_path, transforms=[DequantizeAsConfigured()])
    reader = QuantizedHuggingFaceStorageReader(str(tmp_path), target_dtype=torch.bfloat16)
    theirs = {name: torch.zeros(array.shape, dtype=torch.bfloat16) for name, array in loaded.items()}
    dcp.load(theirs, storage_reader=reader, no_dist=True)  # type: ignore[attr-defined]  # public, but not in `__all__`
    assert all(_same(loaded[name], theirs[name]) for name in expected)


def test_the_last_blocks_of_an_axis_may_be_smaller(tmp_path: Path) -> None:
    """The array ``kv_a_proj_with_mqa`` of DeepSeek-V3 has 576 rows, so its fifth block has only 64."""
    weight = minilm()["embeddings.word_embeddings.weight"]  # 300 by 384
    values, scales = fp8_blocks(weight[:, :200].contiguous())
    assert scales.shape == (3, 2)
    publish(tmp_path, {"a.weight": values, "a.weight_scale_inv": scales}, FP8)
    loaded = ckptcore.load(tmp_path, transforms=[DequantizeAsConfigured()])
    assert _same(loaded["a.weight"], _times(values, scales))
    # The stored scales fit blocks of 100 rows as well.
    with pytest.raises(TransformError, match="do not determine the blocks"):
        ckptcore.load(tmp_path, transforms=[Dequantize("{name...}", "{name}_scale_inv")])


def test_compressed_tensors_and_fbgemm_have_a_scale_for_each_row(tmp_path: Path) -> None:
    stored, expected = _quantized_minilm(per_row, "_scale")
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8}}
    for config in (
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}},
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
    ):
        publish(tmp_path, stored, config)
        loaded = ckptcore.load(tmp_path, transforms=[DequantizeAsConfigured()])
        assert loaded.keys() == expected.keys()
        assert all(_same(loaded[name], expected[name]) for name in expected)
    # compressed-tensors computes in the dtype of the scales. If they are bfloat16, the products are exact in float32,
    # and are then rounded as they are here.
    halved = {name: tensor.to(torch.bfloat16) if name.endswith("_scale") else tensor for name, tensor in stored.items()}
    publish(tmp_path, halved, None)
    loaded = ckptcore.load(tmp_path, transforms=[Dequantize("{name...}", "{name}_scale")])
    for name in filter(quantized, expected):
        assert _same(loaded[name], halved[name].to(torch.bfloat16) * halved[name + "_scale"])


def test_one_scale_for_an_array_and_scales_of_activations(tmp_path: Path) -> None:
    stored, expected = _quantized_minilm(per_tensor, "_scale")
    for name in list(filter(quantized, stored)):
        stored[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.5)
    stored["other.input_scale"] = expected["other.input_scale"] = torch.tensor(1.0)  # belongs to no quantised weight
    publish(tmp_path, stored, {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]})
    loaded = ckptcore.load(tmp_path, transforms=[DequantizeAsConfigured()])
    assert loaded.keys() == expected.keys()
    assert all(_same(loaded[name], expected[name]) for name in expected)


def test_integers_of_compressed_tensors(tmp_path: Path) -> None:
    weight = minilm()["encoder.layer.0.output.dense.weight"]
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    stored = {"a.weight": torch.round(weight.float() / scales).to(torch.int8), "a.weight_scale": scales}
    stored["a.mask"] = torch.ones(3, dtype=torch.int8)  # not a weight
    config = {"config_groups": {"g": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}}}
    publish(tmp_path, stored, {"format": "int-quantized", **config})
    loaded = ckptcore.load(tmp_path, transforms=[DequantizeAsConfigured("float32")])
    assert _same(loaded["a.weight"], stored["a.weight"].float() * scales) and loaded["a.mask"].dtype == np.int8


def test_mxfp8_scales_are_exponents(tmp_path: Path) -> None:
    weight = minilm()["encoder.layer.0.output.dense.weight"]
    exponents = torch.floor(torch.log2(weight.float().reshape(384, 48, 32).abs().amax(-1))) - 8
    values = (weight.float() / torch.exp2(exponents).repeat_interleave(32, 1)).to(torch.float8_e4m3fn)
    scales = (exponents + 127).to(torch.uint8)
    expected = _times(values, torch.exp2(exponents), (1, 32))
    for as_bytes in (scales, scales.view(torch.float8_e8m0fnu)):
        stored = {"a.weight": values, "a.weight_scale_inv": as_bytes}
        publish(tmp_path, stored, {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"})
        assert _same(ckptcore.load(tmp_path, transforms=[DequantizeAsConfigured()])["a.weight"], expected)


def _experts() -> torch.Tensor:
    """Return four experts with 192 outputs and 96 inputs."""
    weight = minilm()["encoder.layer.0.intermediate.dense.weight"]  # 1536 by 384
    return torch.stack([weight[:192, 96 * number : 96 * (number + 1)] for number in range(4)])


def test_experts_of_gpt_oss_equal_those_of_transformers(tmp_path: Path) -> None:
    blocks, scales = mxfp4_experts(_experts())
    assert blocks.shape == (4, 192, 3, 16) and scales.shape == (4, 192, 3)
    layer = "model.layers.0.mlp.experts"
    stored = {
        f"{layer}.gate_up_proj_blocks": blocks,
        f"{layer}.gate_up_proj_scales": scales,
        f"{layer}.gate_up_proj_bias": torch.ones(4, 192, dtype=torch.bfloat16),
        "model.embed_tokens.weight": torch.ones(8, 4, dtype=torch.bfloat16),
    }
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    publish(tmp_path, stored, {"quant_method": "mxfp4", "modules_to_not_convert": kept})
    loaded = ckptcore.load(tmp_path, transforms=[DequantizeAsConfigured()])
    assert sorted(loaded) == ["model.embed_tokens.weight", f"{layer}.gate_up_proj", f"{layer}.gate_up_proj_bias"]
    expected = turned_back(blocks, scales)
    assert loaded[f"{layer}.gate_up_proj"].shape == (4, 96, 192)
    assert _same(loaded[f"{layer}.gate_up_proj"], expected)
    assert (expected.transpose(1, 2).float() - _experts().float()).abs().max() < 0.2 * _experts().abs().max()
    by_name = DequantizeMxfp4("{name...}_blocks", "{name}_scales", "{name}")
    loaded = ckptcore.load(tmp_path, transforms=[by_name])
    assert _same(loaded[f"{layer}.gate_up_proj"], expected.transpose(1, 2))


def test_experts_in_4_bits_next_to_blocks_of_float8(tmp_path: Path) -> None:
    """As in DeepSeek-V4, two numbers of 4 bits are in one int8, and each ``.scale`` is a power of two.

    Transformers reads this format with ``Fp8Dequantize``.
    """
    blocks, scales = mxfp4_experts(_experts()[:1])
    packed, of_packed = blocks[0].reshape(192, 48).view(torch.int8), scales[0].view(torch.float8_e8m0fnu)
    values, of_values = fp8_blocks(_experts()[0].contiguous())
    stored = {"e.w1.weight": packed, "e.w1.scale": of_packed, "a.wq.weight": values, "a.wq.scale": of_values}
    publish(tmp_path, stored, {**FP8, "scale_fmt": "ue8m0"})
    loaded = ckptcore.load(tmp_path, transforms=[DequantizeAsConfigured()])
    owner = Fp8Dequantize(None)  # type: ignore[no-untyped-call]  # transformers has no types here
    assert sorted(loaded) == ["a.wq.weight", "e.w1.weight"]
    assert _same(loaded["e.w1.weight"], owner._dequantize_one(packed, of_packed, torch.bfloat16))
    assert _same(loaded["a.wq.weight"], _times(values, of_values))


def test_dequantised_arrays_can_be_transformed(tmp_path: Path) -> None:
    stored, expected = _quantized_minilm(fp8_blocks, "_scale_inv")
    publish(tmp_path, stored, FP8)
    chain: list[Transform] = [DequantizeAsConfigured("float32"), *bert_to_scanned()]
    loaded = ckptcore.load(tmp_path, transforms=chain)["encoder"]["layers"]["attention"]["query"]["kernel"]
    name = "encoder.layer.0.attention.self.query.weight"
    whole = stored[name].float() * stored[name + "_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert loaded.shape == (1, 384, 384) and _same(loaded[0], whole.T)
    wanted = {name: ...} | dict.fromkeys(expected, ...) | {"q": AbstractArray((384, 77), "float32")}
    sliced: list[Transform] = [DequantizeAsConfigured("float32"), Rename(name, "q"), Slice("q", 100, 177, 1)]
    part = ckptcore.load(tmp_path, wanted, transforms=sliced)
    assert _same(part["q"], whole[:, 100:177])


def test_dequantizing_is_described_and_has_no_inverse() -> None:
    chain: list[Transform] = [
        DequantizeAsConfigured(),
        Dequantize("{n...}", "{n}_scale_inv", (128, 128), "float32"),
        DequantizeMxfp4("{n...}_blocks", "{n}_scales", "{n}"),
    ]
    assert describe(chain) == (
        "1. dequantise to bfloat16 by the quantization_config of config.json\n"
        "2. dequantise '{n...}' by the scales '{n}_scale_inv' of blocks of [128, 128] to float32\n"
        "3. dequantise MXFP4 '{n...}_blocks' by the scales '{n}_scales' to bfloat16 as '{n}'"
    )
    for transform in chain:
        with pytest.raises(TransformError, match="has no inverse, because the original values and scales are unknown"):
            inverse([transform])


def test_one_error_lists_all_mismatches(tmp_path: Path) -> None:
    values, scales = fp8_blocks(minilm()["encoder.layer.0.output.dense.weight"])
    stored = {
        "good.weight": values, "good.weight_scale_inv": scales,
        "bare.weight": values,
        "wrong.weight": values, "wrong.weight_scale_inv": scales[:, :2],
        "plain.weight": values.to(torch.bfloat16), "plain.weight_scale_inv": scales,
        "alone.weight_scale_inv": scales,
    }  # fmt: skip
    publish(tmp_path, stored, FP8)
    for transform in (DequantizeAsConfigured(), Dequantize("{name...}", "{name}_scale_inv", BLOCK)):
        with pytest.raises(TransformError, match="4 arrays cannot be dequantised") as caught:
            ckptcore.load(tmp_path, transforms=[transform])
        message = str(caught.value)
        assert "good" not in message
        for expected in (
            r"bare.weight']: ",
            r"wrong.weight']: the scales are float32[3, 2]; expected [3, 12]",
            r"plain.weight']: bfloat16[384, 1536] is not quantised",
            r"alone.weight_scale_inv']: ",
        ):
            assert expected in message


def test_an_error_lists_a_limited_number_of_arrays(tmp_path: Path) -> None:
    values, _ = per_row(torch.ones(2, 2))
    publish(tmp_path, {f"l.{number}.weight": values for number in range(100)}, FP8)
    with pytest.raises(TransformError, match="100 arrays cannot") as caught:
        ckptcore.load(tmp_path, transforms=[DequantizeAsConfigured()])
    assert "and 70 more" in str(caught.value) and str(caught.value).count("\n") < 40


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "awq"}, "quant_method is 'awq'; expected one of fp8"),
        ({"bits": 4}, "quant_method is None"),
        ({"quant_method": ["fp8"]}, r"quant_method is \['fp8'\]"),
        ([], "expected an object"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [0, -1]}, "two positive integers"),
        ({"quant_method": "fp8", "weight_block_size": [True, 1.5]}, "two positive integers"),
        ({"quant_method": "fp8", "weight_block_size": "128x128"}, "two positive integers"),
        ({"quant_method": "fp8", "scale_fmt": 3}, "scale_fmt is 3"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "expected a list of names"),
        ({"quant_method": "fp8", "modules_to_not_convert": [1]}, "expected a list of names"),
        ({"quant_method": "compressed-tensors"}, "config_groups is None"),
        ({"config_groups": {"g": ["Linear"]}}, "has no quantisation of weights"),
        ({"config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}}, "weights of 4 bits"),
        ({"config_groups": {"g": {"weights": {"symmetric": False}}}}, "zero points are not supported"),
        ({"config_groups": {"g": {"weights": {"strategy": "token"}}}}, "the strategy 'token'"),
        ({"config_groups": {"g": {"weights": {"strategy": "block"}}}}, "block_structure is None"),
        ({"config_groups": {"g": {"weights": {"strategy": "group", "group_size": "a"}}}}, "group_size"),
        ({"format": "pack-quantized", "config_groups": {"g": {"weights": {}}}}, "the format 'pack-quantized'"),
    ],
)  # fmt: skip
def test_an_unsupported_config_is_refused(config: Any, message: str, tmp_path: Path) -> None:
    values, scales = per_row(torch.ones(4, 4))
    publish(tmp_path, {"a.weight": values, "a.weight_scale": scales}, config)
    with pytest.raises(TransformError, match=message) as caught:
        ckptcore.load(tmp_path, transforms=[DequantizeAsConfigured()])
    assert "times scales of blocks, use Dequantize(values, scales, block); for MXFP4, Dequant" in str(caught.value)
    loaded = ckptcore.load(tmp_path, transforms=[Dequantize("{n...}.weight", "{n}.weight_scale", (1, 4), "float32")])
    assert list(loaded) == ["a.weight"]
    assert np.allclose(loaded["a.weight"], 1, atol=0.01)


def test_all_mistakes_of_a_config_are_listed(tmp_path: Path) -> None:
    group = {"weights": {"num_bits": 3, "type": "float", "symmetric": False, "strategy": "x"}, "format": "y"}
    publish(tmp_path, {"a": torch.ones(2)}, {"config_groups": {"g": group, "h": 3}, "ignore": {}})
    with pytest.raises(TransformError) as caught:
        ckptcore.load(tmp_path, transforms=[DequantizeAsConfigured()])
    for message in (
        "3 bits of 'float'",
        "not symmetric",
        "the strategy 'x'",
        "the format 'y'",
        "['h']",
        "ignore is {}",
    ):
        assert message in str(caught.value)


@pytest.mark.parametrize("text", ["[]", "{", '{"quantization_config": NaN}', '{"a": 1, "a": 2}', "[" * 10000, ""])
def test_a_config_that_is_not_a_json_object_is_refused(text: str, tmp_path: Path) -> None:
    publish(tmp_path, {"a": torch.ones(2)}, None)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises((CorruptCheckpointError, TransformError), match=r"config\.json"):
        ckptcore.load(tmp_path, transforms=[DequantizeAsConfigured()])


def test_a_config_may_contain_infinity(tmp_path: Path) -> None:
    values, scales = fp8_blocks(torch.ones(4, 4))
    publish(tmp_path, {"a.weight": values, "a.weight_scale_inv": scales}, None)
    (tmp_path / "config.json").write_text(
        '{"time_step_limit": [0.0, Infinity], "text_config": {"quantization_config": {"quant_method": "fp8"}}}'
    )
    loaded = ckptcore.load(tmp_path / "model.safetensors", transforms=[DequantizeAsConfigured()])
    assert (loaded["a.weight"] == 1).all()


def test_a_checkpoint_without_a_config_is_refused(tmp_path: Path) -> None:
    publish(tmp_path, {"a": torch.ones(2)}, None)
    with pytest.raises(TransformError, match=r"config\.json is missing"):
        ckptcore.load(tmp_path, transforms=[DequantizeAsConfigured()])
    ckptcore.save("memory://dequantizing/ours", {"a": np.ones(2)})
    with pytest.raises(TransformError, match=r"config\.json is missing"):
        ckptcore.load("memory://dequantizing/ours", transforms=[DequantizeAsConfigured()])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TransformError, match="no quantization_config"):
        ckptcore.load(tmp_path, transforms=[DequantizeAsConfigured()])
    assert ckptcore.load(tmp_path, transforms=[IfPresent(DequantizeAsConfigured())])["a"].shape == (2,)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    with pytest.raises(TransformError, match="no array is quantised"):
        ckptcore.load(tmp_path, transforms=[DequantizeAsConfigured()])


def test_modules_listed_as_not_converted_stay_unchanged(tmp_path: Path) -> None:
    values, scales = fp8_blocks(torch.ones(4, 4))
    stored = {"a.weight": values, "a.weight_scale_inv": scales, "m.table.weight": values, "x.y.gate.weight": values}
    publish(tmp_path, stored, {**FP8, "modules_to_not_convert": ["m", "gate", "lm_head"]})
    loaded = ckptcore.load(tmp_path, transforms=[DequantizeAsConfigured()])
    assert {name: str(array.dtype) for name, array in loaded.items()} == {
        "a.weight": "bfloat16", "m.table.weight": "float8_e4m3fn", "x.y.gate.weight": "float8_e4m3fn",
    }  # fmt: skip
    publish(tmp_path, {**stored, "m.table.weight_scale_inv": scales}, {**FP8, "modules_to_not_convert": ["m", "gate"]})
    with pytest.raises(TransformError, match="'m.table' is listed as not converted, but"):
        ckptcore.load(tmp_path, transforms=[DequantizeAsConfigured()])


def test_scales_of_a_cache_are_dropped_if_the_config_names_a_cache_scheme(tmp_path: Path) -> None:
    values, scales = per_row(torch.ones(4, 4))
    group = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    stored = {"a.weight": values, "a.weight_scale": scales, "attn.k_scale": torch.ones(1)}
    publish(tmp_path, stored, {"config_groups": {"g": group}})
    assert sorted(ckptcore.load(tmp_path, transforms=[DequantizeAsConfigured()])) == ["a.weight", "attn.k_scale"]
    publish(tmp_path, stored, {"config_groups": {"g": group}, "kv_cache_scheme": {"num_bits": 8}})
    assert sorted(ckptcore.load(tmp_path, transforms=[DequantizeAsConfigured()])) == ["a.weight"]


def test_zero_points_and_ambiguous_scales_are_refused(tmp_path: Path) -> None:
    values, scales = per_row(torch.ones(4, 4))
    group = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    stored = {"a.weight": values, "a.weight_scale": scales, "a.weight_zero_point": torch.ones(4, 1)}
    publish(tmp_path, stored, {"config_groups": {"g": group}})
    with pytest.raises(TransformError, match="unsupported data .*'a.weight_zero_point'"):
        ckptcore.load(tmp_path, transforms=[DequantizeAsConfigured()])
    publish(tmp_path, {"a.weight": values, "a.weight_scale": scales, "a.weight_scale_inv": scales}, FP8)
    with pytest.raises(TransformError, match="expected one of the scales .*, found 2"):
        ckptcore.load(tmp_path, transforms=[DequantizeAsConfigured()])


def test_patterns_of_arrays_and_scales_must_have_the_same_fields(tmp_path: Path) -> None:
    publish(tmp_path, {"a": torch.ones(2)}, None)
    for transform in (
        Dequantize("{a}.{b}", "{a}_scale"),
        Dequantize("*.weight", "*.scale"),
        DequantizeMxfp4("{n}_blocks", "{m}_scales", "{n}"),
    ):
        with pytest.raises(TransformError, match="must have the same fields"):
            ckptcore.load(tmp_path, transforms=[transform])
    with pytest.raises(TransformError, match="matches nothing"):
        ckptcore.load(tmp_path, transforms=[Dequantize("{n...}", "{n}_scale")])


def test_stacked_arrays_are_dequantised_with_stacked_scales(tmp_path: Path) -> None:
    """Stacked scales belong to stacked arrays. Along the axis of the stack, a block has the extent 1."""
    weights = [minilm()[f"encoder.layer.0.attention.self.{part}.weight"] for part in ("query", "key")]
    pairs = [fp8_blocks(weight) for weight in weights]
    stored = {f"e.{number}.w": values for number, (values, _) in enumerate(pairs)}
    stored |= {f"e.{number}.w_scale_inv": scales for number, (_, scales) in enumerate(pairs)}
    publish(tmp_path, stored, None)
    chain: list[Transform] = [
        Stack("e.{i}.{name}", "{name}"),
        Dequantize("{name}", "{name}_scale_inv", BLOCK),
        Transpose("w"),
    ]
    expected = torch.stack([_times(*pair).T for pair in pairs])
    assert _same(ckptcore.load(tmp_path, transforms=chain)["w"], expected)


def test_an_error_about_a_quantised_array_names_the_transform(tmp_path: Path) -> None:
    values, scales = fp8_blocks(torch.ones(4, 4))
    publish(tmp_path / "fp8", {"a.weight": values, "a.weight_scale_inv": scales}, FP8)
    blocks, of_blocks = mxfp4_experts(_experts())
    publish(tmp_path / "mxfp4", {"e.up_blocks": blocks, "e.up_scales": of_blocks}, None)
    for wanted, location, beside in (
        ({"a.weight": AbstractArray((4, 4), "bfloat16")}, tmp_path / "fp8", "a.weight_scale_inv"),
        ({"e.up": AbstractArray((4, 96, 192), "bfloat16")}, tmp_path / "mxfp4", "e.up_scales"),
    ):
        with pytest.raises(TreeMismatchError, match=rf"its scales are '{beside}'\): to load them .*\[Dequant"):
            ckptcore.load(location, wanted)
    ckptcore.save("memory://dequantizing/plain", {"a.weight": np.ones(3, np.int8)})
    with pytest.raises(TreeMismatchError) as caught:
        ckptcore.load("memory://dequantizing/plain", {"a.weight": np.ones(3, np.int16)})
    assert "quantised" not in str(caught.value)


def test_a_cast_does_not_ignore_scales(tmp_path: Path) -> None:
    values, scales = fp8_blocks(torch.ones(4, 4))
    publish(tmp_path, {"a.weight": values, "a.weight_scale_inv": scales, "b.weight": values}, FP8)
    matching = ckptcore.Matching(cast="safe", unexpected="ignore")
    wanted = {"a.weight": AbstractArray((4, 4), "bfloat16")}
    with pytest.raises(TreeMismatchError, match=r"(?s)is quantised: a cast would ignore its scales.*Dequantize"):
        ckptcore.load(tmp_path, wanted, matching=matching)
    both = {**wanted, "a.weight_scale_inv": AbstractArray((1, 1), "float32")}
    assert (ckptcore.load(tmp_path, both, matching=matching)["a.weight"] == 448).all(), (
        "values and scales were both requested"
    )
    alone = {"b.weight": AbstractArray((4, 4), "bfloat16")}
    assert (ckptcore.load(tmp_path, alone, matching=matching)["b.weight"] == 448).all(), (
        "an array without scales is not quantised"
    )
    numbers = ckptcore.load(
        tmp_path, wanted, matching=matching, transforms=[Dequantize("a.{n}", "a.{n}_scale_inv", BLOCK)]
    )
    assert (numbers["a.weight"] == 1).all()


def test_a_module_of_torch_gets_dequantised_weights(tmp_path: Path) -> None:
    stored, expected = _quantized_minilm(fp8_blocks, "_scale_inv")
    publish(tmp_path, stored, FP8)
    name = "encoder.layer.0.intermediate.dense"
    module = torch.nn.Linear(384, 1536, dtype=torch.bfloat16)
    chain: list[Transform] = [DequantizeAsConfigured(), Rename(f"{name}.{{part}}", "{part}")]
    ckptcore.load_into(tmp_path, module, transforms=chain, matching=ckptcore.Matching(unexpected="ignore"))
    assert torch.equal(module.weight, expected[f"{name}.weight"]) and torch.equal(module.bias, expected[f"{name}.bias"])
