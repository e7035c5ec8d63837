"""``ckptcore convert``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ckptcore
from ckptcore.model import HostArray, dtype_from_name
from plugins.tools.tests.cli.conftest import Run, RunJson, flip
from plugins.tools.tests.cli.expected_documents import ConvertDocument, ErrorDocument


def test_a_bare_file_becomes_a_checkpoint(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    arrays: dict[str, HostArray] = {"a.b": np.arange(6, dtype=np.float16).reshape(2, 3), "c": np.ones((), np.int64)}
    save_file(arrays, tmp_path / "model.safetensors")
    code, document = run_json(ConvertDocument, "convert", tmp_path / "model.safetensors", tmp_path / "ours")
    assert (code, document["arrays"], document["nbytes"], document["layout"]) == (0, 2, 20, "safetensors")
    assert ckptcore.verify(tmp_path / "ours").ok
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert all(np.array_equal(written[name], array) for name, array in arrays.items())
    assert run("diff", tmp_path / "model.safetensors", tmp_path / "ours").exit_code == 0


def test_prints_a_report(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    result = run("convert", checkpoint, tmp_path / "copy")
    assert result.stdout == f"written: 5 arrays of 66 B to {tmp_path / 'copy'} as safetensors\n"
    assert ckptcore.metadata(tmp_path / "copy").custom == {"accuracy": 0.5}


def test_replaces_only_on_request(run: Run, run_json: RunJson, checkpoint: Path, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "there", {"x": 1})
    code, document = run_json(ErrorDocument, "convert", checkpoint, tmp_path / "there")
    assert (code, document["error"]) == (7, "CheckpointExistsError")
    assert ckptcore.load(tmp_path / "there") == {"x": 1}
    assert run("convert", checkpoint, tmp_path / "there", "--overwrite").exit_code == 0
    assert run("diff", checkpoint, tmp_path / "there").exit_code == 0


def test_a_missing_layout_is_an_error(run_json: RunJson, checkpoint: Path, tmp_path: Path) -> None:
    code, document = run_json(ErrorDocument, "convert", checkpoint, tmp_path / "copy", "--layout", "parchment")
    assert (code, document["error"]) == (5, "UnknownPluginError")
    assert "safetensors" in document["message"]
    assert not (tmp_path / "copy").exists()


def test_damage_is_not_copied(run_json: RunJson, checkpoint: Path, tmp_path: Path) -> None:
    flip(checkpoint / "model.safetensors", -1)
    assert run_json(ErrorDocument, "convert", checkpoint, tmp_path / "copy")[0] == 4
    assert not (tmp_path / "copy").exists()


def test_a_missing_checkpoint_is_an_error(run_json: RunJson, tmp_path: Path) -> None:
    assert run_json(ErrorDocument, "convert", tmp_path / "nothing", tmp_path / "copy")[0] == 3


def test_a_map_converts_in_both_directions(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    arrays: dict[str, HostArray] = {"model.embed_tokens.weight": np.ones((4, 2)), "model.norm.weight": np.ones(2)}
    for layer in range(2):
        arrays |= {f"model.layers.{layer}.self_attn.{part}_proj.weight": np.full((4, 2), layer) for part in "qkv"}
        arrays[f"model.layers.{layer}.mlp.up_proj.weight"] = np.arange(6.0).reshape(3, 2)
        arrays[f"model.layers.{layer}.input_layernorm.weight"] = np.ones(2)
    save_file(arrays, tmp_path / "model.safetensors")
    there = ["convert", tmp_path / "model.safetensors", tmp_path / "scanned", "--map", "llama-to-scanned"]
    code, document = run_json(ConvertDocument, *there)
    assert (code, document["arrays"]) == (0, 7)
    assert ckptcore.load(tmp_path / "scanned")["layers"]["mlp"]["up_proj"]["kernel"].shape == (2, 2, 3)
    back = ["convert", tmp_path / "scanned", tmp_path / "back", "--map", "scanned-to-llama"]
    assert run(*back).exit_code == 0
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert written.keys() == arrays.keys()
    assert all(np.array_equal(written[name], array) for name, array in arrays.items())


@pytest.mark.parametrize(("family", "options"), [("llama", ["--rope-type", "llama3.1"]), ("qwen", [])])
def test_to_maxtext_and_back(run: Run, family: str, options: list[str], tmp_path: Path) -> None:
    arrays: dict[str, HostArray] = {
        "model.embed_tokens.weight": np.ones((6, 4), np.float32),
        "model.norm.weight": np.ones(4),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for part in "qkvo":
            arrays[f"{prefix}.self_attn.{part}_proj.weight"] = np.arange(16.0).reshape(4, 4) + layer
        for part in ("gate", "up", "down"):
            arrays[f"{prefix}.mlp.{part}_proj.weight"] = np.arange(16.0).reshape(4, 4) * layer
        for norm in ("input", "post_attention"):
            arrays[f"{prefix}.{norm}_layernorm.weight"] = np.ones(4)
    save_file(arrays, tmp_path / "model.safetensors")
    map_options = ["--head-dim", 4, *options]
    there = ["convert", tmp_path / "model.safetensors", tmp_path / "maxtext", "--layout", "ocdbt"]
    assert run(*there, "--map", f"{family}-to-maxtext", *map_options).exit_code == 0
    made = ckptcore.load(tmp_path / "maxtext")["params"]["params"]["decoder"]["layers"]["self_attention"]
    assert made["query"]["kernel"].shape == (4, 2, 1, 4)
    assert (
        run("convert", tmp_path / "maxtext", tmp_path / "back", "--map", f"maxtext-to-{family}", *map_options).exit_code
        == 0
    )
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert written.keys() == arrays.keys()
    assert all(np.array_equal(written[name], array) for name, array in arrays.items())


def test_names_with_a_prefix_are_mapped_by_it(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    arrays: dict[str, HostArray] = {
        "text.model.embed_tokens.weight": np.ones((4, 2)),
        "text.model.norm.weight": np.ones(2),
    }
    arrays["text.model.layers.0.self_attn.q_proj.weight"] = np.ones((4, 2))
    arrays["text.model.layers.0.mlp.up_proj.weight"] = arrays["text.model.layers.0.input_layernorm.weight"] = np.ones(
        (3, 2)
    )
    save_file(arrays, tmp_path / "model.safetensors")
    there = ["convert", tmp_path / "model.safetensors", tmp_path / "scanned", "--map", "llama-to-scanned"]
    assert run(*there).exit_code == 6
    code, _ = run_json(ConvertDocument, *there, "--prefix", "text.")
    assert code == 0 and ckptcore.load(tmp_path / "scanned")["text"]["layers"]["mlp"]["up_proj"]["kernel"].shape == (
        1,
        2,
        3,
    )


@pytest.mark.parametrize("option", [("--prefix", "text."), ("--head-dim", "64"), ("--rope-type", "default")])
def test_options_of_a_map_need_a_map(run: Run, checkpoint: Path, tmp_path: Path, option: tuple[str, str]) -> None:
    result = run("convert", checkpoint, tmp_path / "copy", *option)
    assert result.exit_code == 2 and "need --map" in result.output and not (tmp_path / "copy").exists()


def test_a_map_of_another_model_is_refused(run_json: RunJson, checkpoint: Path, tmp_path: Path) -> None:
    code, document = run_json(ErrorDocument, "convert", checkpoint, tmp_path / "copy", "--map", "llama-to-scanned")
    assert (code, document["error"]) == (6, "TransformError")
    assert "'model.embed_tokens.weight' matches nothing" in document["message"]
    to_maxtext = ["convert", checkpoint, tmp_path / "copy", "--map", "llama-to-maxtext"]
    for options, needed in (([], "--head-dim"), (["--head-dim", 64], "--rope-type")):
        code, document = run_json(ErrorDocument, *to_maxtext, *options)
        assert (code, document["error"]) == (6, "TransformError")
        assert f"requires {needed}" in document["message"]
    assert not (tmp_path / "copy").exists()


def test_several_checkpointables_are_not_mapped(run_json: RunJson, tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "both", {"a": {"w": np.ones(2)}, "b": {"w": np.ones(2)}})
    _, document = run_json(ErrorDocument, "convert", tmp_path / "both", tmp_path / "copy", "--map", "bert-to-scanned")
    assert document["error"] == "TransformError" and "Convert each by its own location" in document["message"]
    assert not (tmp_path / "copy").exists()


def test_quantised_weights_are_dequantised_before_they_are_mapped(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    values = np.full((4, 2), 0.5, dtype_from_name("float8_e4m3fn"))
    arrays = {"encoder.layer.0.attention.output.dense.weight": values, "w.weight": np.ones(3, np.float32)}
    scales = {"encoder.layer.0.attention.output.dense.weight_scale_inv": np.full((1, 1), 3, np.float32)}
    ckptcore.save(tmp_path / "ours", {**arrays, **scales}, layout=ckptcore.SafetensorsLayout(standalone=True))
    (tmp_path / "model").mkdir()
    (tmp_path / "ours" / "model.safetensors").rename(tmp_path / "model" / "model.safetensors")
    there = ["convert", tmp_path / "model", tmp_path / "numbers", "--dequantize"]
    code, document = run_json(ErrorDocument, *there, "bfloat16")
    assert (code, document["error"]) == (6, "TransformError") and "config.json" in document["message"]
    (tmp_path / "model" / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    refused = run(*there, "bfloat17")
    assert refused.exit_code == 2 and "bfloat17" in refused.stderr
    code, written = run_json(ConvertDocument, *there, "bfloat16")
    assert (code, written["arrays"], written["nbytes"]) == (0, 2, 8 * 2 + 3 * 4)
    loaded = ckptcore.load(tmp_path / "numbers")["encoder.layer.0.attention.output.dense.weight"]
    assert str(loaded.dtype) == "bfloat16" and (loaded == 1.5).all()
