"""Writes the golden versions of slime: ``python FILE SLIME SGLANG DIRECTORY``, in an environment with zstandard.

``SLIME`` is a checkout of https://github.com/THUDM/slime at 624b824a, and ``SGLANG`` the file
``python/sglang/srt/weight_sync/local_checkpoint.py`` of the branch ``sglang-miles`` of SGLang. Their code runs
unmodified. The modules that the writer imports for GPUs and for the job (Megatron, Ray) are replaced by stubs, so that
one process gathers the tensors that this program passes. Run by hand; tests only read the files.

For each encoding and checksum, ``DIRECTORY`` gets the Hugging Face model ``base``, the versions ``weight_v000001`` to
``weight_v000003``, and ``pulled``, the file of the model after SGLang has pulled version 3.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import types
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file


class Distributed:
    """The base class of the writer, which gathers tensors from GPUs."""

    def __init__(self, args: Namespace, model: Any, weights_getter: Any, **_: Any) -> None:
        self.args, self.weights_getter = args, weights_getter
        self.weight_version = 0
        self.update_weight_metrics: dict[str, float] = {}

    def _iter_non_expert_chunks(self) -> Any:
        yield list(self.weights_getter().items())

    def _iter_expert_chunks(self) -> Any:
        return iter(())


def stub(name: str, **attributes: Any) -> None:
    module = types.ModuleType(name)
    module.__path__ = []
    module.__dict__.update(attributes)
    sys.modules[name] = module


def load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


slime, sglang, directory = map(Path, sys.argv[1:])
rank_zero = types.SimpleNamespace(get_data_parallel_rank=lambda **_: 0, get_tensor_model_parallel_rank=lambda: 0)
package = "slime.backends.megatron_utils.update_weight"
stub("ray", get=lambda references: references)
stub("ray.actor", ActorHandle=object)
stub("megatron")
stub("megatron.core", mpu=rank_zero)
stub("slime")
stream = types.SimpleNamespace(synchronize=lambda: None)
accelerator = types.SimpleNamespace(current_device=lambda: "cpu", current_stream=lambda: stream)
stub("slime.utils", accelerator=accelerator)
stub("slime.utils.distributed_utils", get_gloo_group=lambda: None)
for parent in ("slime.backends", "slime.backends.megatron_utils", package):
    stub(parent)
stub(f"{package}.update_weight_from_distributed", UpdateWeightFromDistributed=Distributed)
load("slime.utils.disk_delta", slime / "slime/utils/disk_delta.py")
writer_path = slime / "slime/backends/megatron_utils/update_weight/update_weight_from_disk_delta.py"
Writer = load(f"{package}.update_weight_from_disk_delta", writer_path).UpdateWeightFromDiskDelta
reader = load("local_checkpoint", sglang)

dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29471", rank=0, world_size=1)
for encoding, checksum in (("xor", "xxh3-128"), ("overwrite", "adler32"), ("xor", "blake3")):
    generator = torch.Generator().manual_seed(7)
    weights = {
        "model.embed_tokens.weight": torch.randn(64, 8, generator=generator).to(torch.bfloat16),
        "model.layers.0.mlp.weight": torch.randn(8, 24, generator=generator).to(torch.float8_e4m3fn),
        "model.norm.weight": torch.ones(8),
        "model.scale": torch.tensor([2.0]),
    }
    target = directory / f"{encoding}_{checksum}"
    shutil.rmtree(target, ignore_errors=True)
    (target / "base").mkdir(parents=True)
    save_file(weights, target / "base" / "model.safetensors", metadata={"format": "pt"})
    args = Namespace(
        hf_checkpoint=str(target / "base"),
        update_weight_disk_dir=str(target / "versions"),
        update_weight_delta_encoding=encoding,
        update_weight_delta_checksum=checksum,
        update_weight_local_checkpoint_dir="",
        custom_update_weight_post_write_path=None,
    )
    writer = Writer(args, None, lambda: weights, model_name="", quantization_config=None)  # noqa: B023
    writer.connect_rollout_engines([], None)
    writer.update_weights()
    for version in range(3):
        weights = {name: tensor.clone() for name, tensor in weights.items()}
        if version < 2:  # the last version changes nothing
            weights["model.embed_tokens.weight"][version::17] *= 1.01
            weights["model.layers.0.mlp.weight"].view(torch.uint8)[version, 3] ^= 1
        if version == 1:
            weights["model.scale"] += 0.5
        writer.update_weights()
    for path in (target / "versions").iterdir():
        path.rename(target / path.name)
    (target / "versions").rmdir()
    reader.pull(str(target / "local"), str(target / "base"), str(target), 3)
    (target / "pulled").mkdir()
    (target / "local" / "model.safetensors").rename(target / "pulled" / "model.safetensors")
    shutil.rmtree(target / "local")
dist.destroy_process_group()
