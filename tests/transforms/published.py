"""Decoders with random weights, written by transformers."""

# mypy: allow-untyped-calls

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

HEAD_DIM, EPSILON = 16, 1e-6
TOKENS = np.array([3, 65, 7, 7, 12, 0, 31])


def publish(
    directory: Path,
    kind: str,
    *,
    head_dim: int = HEAD_DIM,
    tied: bool = False,
    dtype: str = "float32",
    biases: bool = False,
) -> Any:
    """Write a model to a directory. All heads together are larger than the embedding, and two heads share each key.

    Args:
        directory: the directory to write to.
        kind: the prefix of the model's class, such as ``"Llama"``.
        head_dim: the number of elements of a head.
        tied: True if the embedding also produces the logits.
        dtype: the dtype of the weights.
        biases: True if projections have biases, for families with this option.

    Returns:
        The model.
    """
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=66, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim, max_position_embeddings=32, rms_norm_eps=EPSILON, tie_word_embeddings=tied,
        attn_implementation="eager",
        **({"attention_bias": True, "mlp_bias": True} if biases else {}),
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    return model


def logits(model: Any) -> Any:
    """Return the logits of a model for `TOKENS`."""
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)[None]).logits[0].numpy()
