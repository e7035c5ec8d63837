"""Replacements for the checkpointing of other libraries: their functions and classes, with ckptcore's saves and loads.

torch_dcp    torch.distributed.checkpoint
orbax_v1     orbax.checkpoint.v1
safetensors  safetensors, with its modules for PyTorch, NumPy and Flax

Adapters for training libraries:

transformers  the Trainer of Hugging Face Transformers
accelerate    Hugging Face Accelerate
deepspeed     DeepSpeed
keras         Keras 3
lightning     PyTorch Lightning
torchtitan    TorchTitan
ray_train     Ray Train

Adapters for servers:

vllm          vLLM: loads checkpoints
engines       installs versions of weights in servers
sglang        SGLang, over HTTP
vllm_server   vLLM, over HTTP
vllm_updates  vLLM: the part of its workers that installs versions

Adapters for trainers that send weights to servers:

verl  verl
trl   AsyncGRPOTrainer of TRL

Adapters for experiment trackers:

wandb   Weights & Biases
mlflow  MLflow

This package imports none of its modules, because each module imports its library.
"""

from __future__ import annotations

import sys

__all__ = ["lightning_callbacks"]


def lightning_callbacks() -> list[object]:
    """Return the callbacks to add to a Trainer: none until `ckptcore_integrations.lightning` is imported.

    Lightning calls this.
    """
    adapter = sys.modules.get("ckptcore_integrations.lightning")
    return [] if adapter is None else [adapter.CheckState()]
