"""Adapters of PEFT models: for every method, ckptcore and PEFT load each other's saves, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ckptcore_torch.adapters import adapter_state, load_adapter, load_adapter_into, save_adapter
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import ckptcore
from ckptcore.errors import TreeMismatchError

peft: Any = pytest.importorskip("peft")
transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns about models that are not on the hub

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TOKENS = torch.arange(8).reshape(2, 4)


class Case(NamedTuple):
    """A config of PEFT to test.

    Attributes:
        options: fields of the config.
        inputs: additional inputs of the model.
        base: options of the base model.
    """

    options: Mapping[str, Any] = {}
    inputs: Mapping[str, Any] = {}
    base: Mapping[str, Any] = {}


PLAIN = Case()
TASKS = {"task_ids": torch.tensor([0, 1])}
WHOLE_MODULES = {"modules_to_save": ["lm_head"]}
METHODS = {  # all other methods need no options
    "ADALORA": Case({"total_step": 10}),
    "ADAPTION_PROMPT": Case({"adapter_len": 3, "adapter_layers": 1, "target_modules": None}),
    "C3A": Case({"block_size": 8}),
    "CPT": Case({"cpt_token_ids": [1, 2, 3], "cpt_tokens_type_mask": [1, 2, 3]}),
    "FOURIERFT": Case({"n_frequency": 8}),
    "FROD": Case({"progressbar": False}),
    "IA3": Case({"feedforward_modules": []}),
    "LN_TUNING": Case({"target_modules": ["input_layernorm"]}),
    "MISS": Case({"r": 4}),
    "MULTITASK_PROMPT_TUNING": Case({"num_tasks": 2}, TASKS),
    "POLY": Case({"n_tasks": 2}, TASKS),
    "PSOFT": Case({"r": 4}),
    "ROAD": Case({"group_size": 8}),
    "SHADOW": Case({"target_modules": None}),
    "SHIRA": Case({"r": 2}),
    "TRAINABLE_TOKENS": Case({"token_indices": [1, 3], "target_modules": ["embed_tokens"]}),
    "VBLORA": Case({"vector_length": 8, "num_vectors": 6}),
    "WAVEFT": Case({"n_frequency": 8}),
    "XLORA": Case({"hidden_size": 16, "xlora_size": 4}, base={"use_cache": False}),
}
KEPT = [True, False, True, False]
VARIANTS = {
    "DoRA": ("LORA", Case({"use_dora": True, "target_modules": ["q_proj", "embed_tokens"]})),
    "biases": ("LORA", Case({"bias": "all", "lora_bias": True}, base={"attention_bias": True})),
    "ranks": ("LORA", Case({"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3}})),
    "modules": ("LORA", Case({"modules_to_save": ["lm_head", "embed_tokens"]})),
    "tied modules": (
        "LORA",
        Case({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, base={"tie_word_embeddings": True}),
    ),
    "embeddings": ("LORA", Case({"target_modules": ["embed_tokens", "lm_head"]})),
    "tokens": ("LORA", Case({"trainable_token_indices": {"embed_tokens": [1, 3]}})),
    "tied tokens": ("LORA", Case({"trainable_token_indices": [1, 3]}, base={"tie_word_embeddings": True})),
    "PiSSA": ("LORA", Case({"init_lora_weights": "pissa"})),
    "OLoRA": ("LORA", Case({"init_lora_weights": "olora"})),
    "parameters": ("LORA", Case({"target_parameters": ["mlp.down_proj.weight"]})),
    "replicated layers": ("LORA", Case({"layer_replication": [(0, 1), (0, 1)]})),
    "pruned ranks": (
        "ADALORA",
        Case(
            {
                "total_step": 10,
                "init_r": 4,
                "rank_pattern": {f"model.layers.0.self_attn.{module}.lora_E": KEPT for module in ("q_proj", "v_proj")},
            }
        ),
    ),
    "IA3 and modules": ("IA3", Case({**WHOLE_MODULES, "feedforward_modules": []})),
    "prompts and modules": ("PROMPT_TUNING", Case(WHOLE_MODULES)),
    "projected prefixes": ("PREFIX_TUNING", Case({"prefix_projection": True, "encoder_hidden_size": 8})),
    "frozen tokens": ("CARTRIDGE", Case({"num_frozen_tokens": 1})),
    "VeRA without projections": ("VERA", Case({"save_projection": False})),
    "largest logits": ("VBLORA", Case({"vector_length": 8, "num_vectors": 6, "save_only_topk_weights": True})),
    "indices": ("UNILORA", Case({"save_indices": True})),
}
COMPUTED = ("P_TUNING", "projected prefixes")
"""Cases with prompts that a network computes. PEFT stores only the prompts, so they load only for inference."""


def base_model(case: Case = PLAIN) -> torch.nn.Module:
    torch.manual_seed(0)
    model: torch.nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **case.base))
    return model.eval()


def config_of(method: str, case: Case, directory: Path, *, inference: bool = False) -> Any:
    kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING[method]
    options: dict[str, Any] = {
        "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], "num_virtual_tokens": 3,
        "inference_mode": inference, **case.options,
    }  # fmt: skip
    known = {field.name for field in dataclasses.fields(kind)} - ({"num_virtual_tokens"} if method == "CPT" else set())
    if method == "XLORA":
        options["adapters"] = {name: str(_lora(directory / name)) for name in ("0", "1")}
    return kind(**{name: value for name, value in options.items() if name in known and value is not None})


def _lora(directory: Path) -> Path:
    if not directory.exists():
        trained(base_model(), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])).save_pretrained(
            directory
        )
    return directory


def trained(base: torch.nn.Module, config: Any) -> Any:
    """Return a PEFT model with random trainable parameters."""
    model = peft.get_peft_model(base, config)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def output(model: torch.nn.Module, case: Case = PLAIN) -> torch.Tensor:
    torch.manual_seed(2)
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=TOKENS, **case.inputs).logits
    return result


def files(directory: Path) -> tuple[dict[str, torch.Tensor], Any]:
    config = json.loads((directory / "adapter_config.json").read_bytes())
    plain = {name: sorted(value, key=str) if isinstance(value, list) else value for name, value in config.items()}
    return load_file(directory / "adapter_model.safetensors"), plain


def equal(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) and first[name].dtype == second[name].dtype for name in first
    )


EVERY = {method.value: (method.value, METHODS.get(method.value, Case())) for method in peft.PeftType}


@pytest.mark.brings("adapter of each of the 45 methods", "peft", "same")
@pytest.mark.parametrize("name", [*EVERY, *[pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]])
def test_adapters_are_saved_as_by_peft(tmp_path: Path, name: str) -> None:
    """Methods of newer versions of PEFT are tried without options. If that fails, add a case to `METHODS`."""
    method, case = {**EVERY, **VARIANTS}[name]
    model = trained(base_model(case), config_of(method, case, tmp_path))
    model.save_pretrained(tmp_path / "theirs")
    save_adapter(tmp_path / "ours", model)
    if name == "XLORA":
        # PEFT drops all arrays whose names contain the name of another adapter. The adapters are named "0" and "1",
        # so PEFT also drops layers.0 of the classifier.
        assert not load_file(tmp_path / "theirs" / "adapter_model.safetensors")
        shutil.copy(tmp_path / "ours" / "adapter_model.safetensors", tmp_path / "theirs")
    ours, theirs = files(tmp_path / "ours"), files(tmp_path / "theirs")
    assert equal(ours[0], theirs[0]) and ours[1] == theirs[1]
    expected, actual = (
        output(peft.PeftModel.from_pretrained(base_model(case), str(tmp_path / directory)), case)
        for directory in ("theirs", "ours")
    )
    assert torch.equal(actual, expected)
    for directory in ("ours", "theirs"):
        fresh = peft.get_peft_model(base_model(case), config_of(method, case, tmp_path, inference=name in COMPUTED))
        assert not equal(adapter_state(fresh), theirs[0])
        assert load_adapter_into(tmp_path / directory, fresh)["peft_type"] == method
        assert torch.equal(output(fresh, case), expected)
        if name != "largest logits":  # PEFT converts these logits to logarithms at the load, which rounds
            assert equal(adapter_state(fresh), theirs[0])
        report = ckptcore.verify(tmp_path / directory)
        assert not report.problems and not report.unjudged
    others = {key: tensor for key, tensor in theirs[0].items() if key.endswith("lm_head.weight")}
    save_file(others, tmp_path / "theirs" / "adapter_model.safetensors")  # a file without the adapter's own arrays
    assert not ckptcore.verify(tmp_path / "theirs").ok


LORA = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}


@pytest.mark.brings("trainable parameter outside of the adapter", "peft", "refused")
def test_a_trainable_parameter_that_peft_does_not_save(tmp_path: Path) -> None:
    model = trained(base_model(), peft.LoraConfig(**LORA))
    norm = model.base_model.model.model.norm.weight.requires_grad_(True)
    with pytest.raises(TreeMismatchError, match=r"model\.norm\.weight: trainable, .*modules_to_save=\['norm'\].*False"):
        save_adapter(tmp_path / "a", model)
    assert not (tmp_path / "a").exists()
    norm.requires_grad_(False)
    save_adapter(tmp_path / "a", model)
    again = trained(base_model(), peft.LoraConfig(**LORA, modules_to_save=["norm"]))
    save_adapter(tmp_path / "b", again)
    assert "base_model.model.model.norm.weight" in load_adapter(tmp_path / "b").arrays


@pytest.mark.brings("trainable parameter outside of LoRA in a model without a config of PEFT", "torch", "refused")
def test_a_model_without_peft_whose_base_is_frozen(tmp_path: Path) -> None:
    model = peft.get_peft_model(base_model(), peft.LoraConfig(**LORA)).base_model.model
    del model.peft_config
    config: dict[str, Any] = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}
    model.lm_head.weight.requires_grad_(True)
    with pytest.raises(TreeMismatchError, match=r"lm_head\.weight: trainable, but not a part of the adapter 'default'"):
        save_adapter(tmp_path / "a", model, config)
    model.lm_head.weight.requires_grad_(False)
    save_adapter(tmp_path / "a", model, config)
    assert ckptcore.verify(tmp_path / "a").ok


@pytest.mark.brings("method that PEFT does not have", "peft", "refused")
def test_methods_that_are_not_known(tmp_path: Path) -> None:
    plain = base_model()
    arrays = {"base_model.model.q.future_A": torch.ones(2)}
    for source, config, error, said in (
        (
            plain,
            {"peft_type": "IA3"},
            TypeError,
            "peft_type is 'IA3', and the LlamaForCausalLM has no config of PEFT.*arrays",
        ),
        (plain, {"peft_type": "FUTURE"}, ValueError, "'FUTURE', which is none of the 45 methods of peft 0.21.2"),
        (
            arrays,
            {"peft_type": "FUTURE"},
            ValueError,
            "'FUTURE', which is none of the 45 methods .*: correct it, or pass",
        ),
    ):
        with pytest.raises(error, match=said):
            save_adapter(tmp_path / "a", source, config)
    assert not (tmp_path / "a").exists()
    (tmp_path / "a").mkdir()
    save_file(arrays, tmp_path / "a" / "adapter_model.safetensors")
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({"peft_type": "FUTURE"}))
    report = ckptcore.verify(tmp_path / "a")
    assert report.ok and "the method 'FUTURE' is not known" in report.unjudged[0]


@pytest.mark.brings("prompts that a network computes, loaded to train further", "peft", "refused")
def test_computed_prompts_cannot_be_trained_further(tmp_path: Path) -> None:
    method, case = EVERY["P_TUNING"]
    save_adapter(tmp_path / "a", trained(base_model(), config_of(method, case, tmp_path)))
    fresh = peft.get_peft_model(base_model(), config_of(method, case, tmp_path))
    before = output(fresh)
    with pytest.raises(TreeMismatchError, match=r"prompt_encoder\.default: the model computes .*from_pretrained"):
        load_adapter_into(tmp_path / "a", fresh)
    assert torch.equal(output(fresh), before)


def test_an_adapter_of_another_method_is_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path / "a", trained(base_model(), peft.LoraConfig(**LORA)))
    other = peft.get_peft_model(base_model(), peft.LoHaConfig(**LORA))
    with pytest.raises(TreeMismatchError, match="has the method LORA, and 'default' in the model LOHA"):
        load_adapter_into(tmp_path / "a", other)


@pytest.mark.brings("several adapters, also named as layers are", "peft", "same")
def test_several_adapters(tmp_path: Path) -> None:
    model = trained(base_model(), peft.LoraConfig(**LORA, modules_to_save=["lm_head"]))
    model.add_adapter("0", peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["v_proj"]))
    model.add_adapter("second", peft.LoraConfig(**LORA, r=2))
    for name in ("default", "0", "second"):
        save_adapter(tmp_path / name, model, adapter_name=name)
    assert sorted(load_adapter(tmp_path / "default").arrays) == [
        "base_model.model.lm_head.weight",
        *[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight" for part in "AB"],
    ]
    assert sorted(load_adapter(tmp_path / "0").arrays) == [
        f"base_model.model.model.layers.0.self_attn.v_proj.lora_{part}.weight" for part in "AB"
    ]
    assert list(model.peft_config) == ["default", "0", "second"]
    fresh = peft.get_peft_model(base_model(), peft.LoraConfig(**LORA, modules_to_save=["lm_head"]), "mine")
    load_adapter_into(tmp_path / "default", fresh, adapter_name="mine")
    assert torch.equal(output(fresh), output(model))


@pytest.mark.brings("adapter that transformers added to its model", "transformers", "same")
def test_an_adapter_of_transformers(tmp_path: Path) -> None:
    model = base_model()
    model.add_adapter(peft.LoraConfig(**LORA))  # type: ignore[operator]  # a method of transformers
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "theirs")  # type: ignore[operator]
    save_adapter(tmp_path / "ours", model)
    assert equal(files(tmp_path / "ours")[0], files(tmp_path / "theirs")[0])
    assert files(tmp_path / "ours")[1] == files(tmp_path / "theirs")[1]
    fresh = base_model()
    fresh.add_adapter(peft.LoraConfig(**LORA))  # type: ignore[operator]
    load_adapter_into(tmp_path / "theirs", fresh)
    assert torch.equal(output(fresh), output(model))


def test_arrays_of_another_dtype_are_cast_on_request(tmp_path: Path) -> None:
    model = trained(base_model(), peft.LoraConfig(**LORA))
    state = {name: tensor.to(torch.bfloat16) for name, tensor in adapter_state(model).items()}
    save_adapter(tmp_path / "a", state, model.peft_config["default"])
    fresh = peft.get_peft_model(base_model(), peft.LoraConfig(**LORA))
    with pytest.raises(TreeMismatchError, match="pass matching=Matching") as raised:
        load_adapter_into(tmp_path / "a", fresh)
    assert "transforms=" not in str(raised.value)
    load_adapter_into(tmp_path / "a", fresh, matching=ckptcore.Matching(cast="safe"))
    assert equal(adapter_state(fresh), {name: tensor.float() for name, tensor in state.items()})


@pytest.mark.brings("adapter of a model on the meta device", "peft", "same")
def test_an_adapter_loads_into_a_model_on_the_meta_device(tmp_path: Path) -> None:
    model = trained(base_model(), peft.LoraConfig(**LORA, use_dora=True))
    save_adapter(tmp_path / "a", model)
    fresh = peft.get_peft_model(base_model(), peft.LoraConfig(**LORA, use_dora=True), low_cpu_mem_usage=True)
    load_adapter_into(tmp_path / "a", fresh)
    assert torch.equal(output(fresh), output(model))


@pytest.mark.brings("model in `torch.compile` or `DataParallel`", "peft", "same")
@pytest.mark.parametrize("wrap", [torch.compile, torch.nn.DataParallel])
def test_a_model_in_a_wrapper(tmp_path: Path, wrap: Any) -> None:
    model = trained(base_model(), peft.LoraConfig(**LORA, modules_to_save=["lm_head"]))
    layers = model.base_model.model.model.layers
    expected, result = adapter_state(model), output(model)
    layers[0].self_attn = torch.compile(layers[0].self_attn)
    save_adapter(tmp_path / "a", wrap(model))
    assert equal(load_file(tmp_path / "a" / "adapter_model.safetensors"), expected)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.zeros_(parameter)
    load_adapter_into(tmp_path / "a", wrap(model))
    layers[0].self_attn = layers[0].self_attn._orig_mod
    assert torch.equal(output(model), result)


def test_a_model_that_was_compiled_before_it_got_the_adapter(tmp_path: Path) -> None:
    model = trained(torch.compile(base_model()), peft.LoraConfig(target_modules=["q_proj"]))  # type: ignore[arg-type]
    save_adapter(tmp_path / "a", model)
    plain = peft.get_peft_model(base_model(), peft.LoraConfig(**LORA))
    load_adapter_into(tmp_path / "a", plain)
    assert equal(adapter_state(plain), adapter_state(model))


def test_verify_reports_missing_parts_of_an_adapter(tmp_path: Path) -> None:
    """A missing matrix and missing modules_to_save are problems. A missing target module may not exist in the model."""
    model = trained(base_model(), peft.LoraConfig(**LORA, modules_to_save=["lm_head"]))
    model.save_pretrained(tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    stored = load_file(file)
    half = next(name for name in stored if "lora_B" in name)
    save_file({name: tensor for name, tensor in stored.items() if name != half}, file)
    (problem,) = ckptcore.verify(tmp_path / "a").problems
    assert half in problem.message and problem.key == "adapter_config.json"
    save_file({name: tensor for name, tensor in stored.items() if "lm_head" not in name}, file)
    assert "no array of modules_to_save lm_head" in ckptcore.verify(tmp_path / "a").problems[0].message
    save_file(stored, file)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["q_proj", "query"]}))
    report = ckptcore.verify(tmp_path / "a")
    assert report.ok and report.unjudged == ("adapter_config.json: no array of target_modules query",)


def test_a_classifier_is_complete_with_one_of_its_two_heads(tmp_path: Path) -> None:
    """PEFT adds the names of two heads to the config, but a model has only one of them."""
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))
    save_adapter(tmp_path / "a", peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS")))
    report = ckptcore.verify(tmp_path / "a")
    assert report.ok and report.unjudged == ()
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({**config, "modules_to_save": ["score", ["a"]]}))
    assert not ckptcore.verify(tmp_path / "a").ok


@pytest.mark.system
@pytest.mark.brings("adapter in a job with `DistributedDataParallel`, FSDP2, or FSDP1 (saves only)", "peft", "same")
@pytest.mark.parametrize(
    "wrapper", ["fsdp2", pytest.param("ddp", marks=pytest.mark.slow), pytest.param("fsdp1", marks=pytest.mark.slow)]
)
def test_a_job_saves_and_loads(torchrun: Any, tmp_path: Path, wrapper: str) -> None:
    torchrun(2, __file__, wrapper, tmp_path)


def _job(wrapper: str, directory: Path) -> None:
    model = trained(base_model(), peft.LoraConfig(**LORA, modules_to_save=["lm_head"]))
    expected = {name: tensor.clone() for name, tensor in adapter_state(model).items()}
    if wrapper == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        wrapped = model
    elif wrapper == "fsdp1":
        wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    save_adapter(directory / "a", wrapped)
    assert equal(load_file(directory / "a" / "adapter_model.safetensors"), expected)
    if wrapper == "fsdp1":
        with pytest.raises(TypeError, match="load the adapter before it wraps the model, or use fully_shard"):
            load_adapter_into(directory / "a", wrapped)
    else:
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.zeros_(parameter)
        load_adapter_into(directory / "a", wrapped)
        assert equal(adapter_state(wrapped), expected)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    _job(sys.argv[1], Path(sys.argv[2]))
    dist.destroy_process_group()  # after the model, see tests/jobs/torch_groups.py
