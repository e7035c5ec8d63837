"""A worker of vLLM that loads models with vLLM's loader and with ours, and compares the parameters.

``python worker.py RANK SIZE PORT READS MODEL...``. Each `MODEL` is a directory with a Hugging Face model in ``config``
and a checkpoint of ckptcore in ``checkpoint``. The worker uses vLLM's real model classes. For each model, it prints a
line of JSON: the names of weights that differ, the number of bytes that this worker read from the storage, and the
number of bytes of its parameters.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

RANK, SIZE, PORT, READS = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
os.environ.update(
    CKPTCORE_TEST="1",
    MASTER_ADDR="127.0.0.1",
    MASTER_PORT=PORT,
    VLLM_DIST_IDENT=PORT,
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

import torch
from ckptcore_testing import FaultPlan, FaultyStorage
from vllm.config import DeviceConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.model_loader import get_model_loader
from vllm.plugins import load_general_plugins

import ckptcore
from ckptcore.builtin.local import LocalStorage
from ckptcore.context import PluginOptions
from ckptcore.protocols import RangeReader, StorageOpener, StorageOptions
from ckptcore.protocols.storage import ReaderByKey


class Counted:
    """A plugin for URLs ``counted:///PATH``, which are local directories. It counts the bytes that are read."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.lock = threading.Lock()

    @ckptcore.hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        return {"counted": lambda url, options: CountedStorage(url.removeprefix("counted://"), options)}

    def add(self, key: str, nbytes: int) -> None:
        if not key.endswith("checkpoint.json"):
            with self.lock:
                self.nbytes += nbytes


COUNTED = Counted()


class CountedStorage(FaultyStorage):
    """A storage that counts the bytes that are read."""

    def __init__(self, path: str, options: StorageOptions) -> None:
        super().__init__(LocalStorage(path, options), FaultPlan())

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        data = super().get(key, start, stop)
        COUNTED.add(key, len(data))
        return data

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        COUNTED.add(key, sum([len(buffer) for _, buffer in ranges]))
        super().get_into(key, ranges)

    def open_reader(self, key: str) -> RangeReader:
        return ReaderByKey(self, key)


def load(directory: str, load_format: str, options: Mapping[str, Any]) -> Any:
    """Load a model as a worker of vLLM does."""
    model = ModelConfig(
        model=f"{directory}/config", tokenizer=f"{directory}/config", skip_tokenizer_init=True, dtype="float32"
    )
    config = VllmConfig(
        model_config=model,
        parallel_config=ParallelConfig(tensor_parallel_size=SIZE),
        load_config=LoadConfig(load_format=load_format, model_loader_extra_config=dict(options)),
        device_config=DeviceConfig("cpu"),
    )
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(SIZE, RANK, f"tcp://127.0.0.1:{PORT}", RANK, "gloo")
            initialize_model_parallel(SIZE)
        return get_model_loader(config.load_config).load_model(vllm_config=config, model_config=model)


def main() -> None:
    """Load each model with both loaders, and print the reports."""
    torch.accelerator.empty_cache = lambda: None  # vLLM's runner for CPUs replaces it as well
    load_general_plugins()
    ours: Any = sys.modules["ckptcore_integrations.vllm"]
    context = ours.Context
    ours.Context = lambda **options: context(**options, plugins=PluginOptions(extra=[COUNTED]))
    for directory in sys.argv[5:]:
        expected = dict(load(directory, "safetensors", {}).named_parameters())
        COUNTED.nbytes = 0
        options = {"checkpoint": f"counted://{directory}/checkpoint", "reads": READS, "batch_bytes": 1 << 30}
        loaded = dict(load(directory, "ckptcore", options).named_parameters())
        different = [name for name in expected if not torch.equal(loaded[name], expected[name])]
        nbytes = sum([tensor.nbytes for tensor in loaded.values()])
        print(json.dumps({"different": different, "read": COUNTED.nbytes, "needed": nbytes}), flush=True)


main()
