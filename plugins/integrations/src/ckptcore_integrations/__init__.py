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

Adapter for a server:

vllm  vLLM

Adapters for experiment trackers:

wandb   Weights & Biases
mlflow  MLflow

This package imports none of its modules, because each module imports its library.
"""

from __future__ import annotations

import sys

__all__ = ["lightning_callbacks"]


def lightning_callbacks() -> list[object]:
    """Return the callbacks to add to a Trainer. Lightning calls this. Empty in programs without our adapter."""
    adapter = sys.modules.get("ckptcore_integrations.lightning")
    return [] if adapter is None else [adapter.CheckState()]
