"""The states of the benchmarks: 1.5 GB of bfloat16 in the shapes of a Llama, and 1000 arrays of 16 floats."""

from __future__ import annotations

import torch


def large_state(gigabytes: float = 1.5) -> dict[str, torch.Tensor]:
    """Return 75 bfloat16 tensors in the proportions of a Llama: embeddings, 8 layers of 9, and a norm."""
    hidden = max(64, int((gigabytes * 1e9 / 1.5e9) ** 0.5 * 2048) // 64 * 64)
    wide = hidden * 11 // 4
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> torch.Tensor:
        bits = torch.randint(0, 1 << 15, shape, generator=generator, dtype=torch.int16)
        return (bits & 0x3FFF).view(torch.bfloat16)

    state = {"model.embed_tokens.weight": tensor(hidden * 42, hidden), "lm_head.weight": tensor(hidden * 42, hidden)}
    for layer in range(8):
        prefix = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            state[f"{prefix}self_attn.{name}.weight"] = tensor(hidden, hidden)
        for name in ("gate_proj", "up_proj"):
            state[f"{prefix}mlp.{name}.weight"] = tensor(wide, hidden)
        state[f"{prefix}mlp.down_proj.weight"] = tensor(hidden, wide)
        state[f"{prefix}input_layernorm.weight"] = tensor(hidden)
        state[f"{prefix}post_attention_layernorm.weight"] = tensor(hidden)
    state["model.norm.weight"] = tensor(hidden)
    return state


def small_state(count: int = 1000) -> dict[str, torch.Tensor]:
    """Return tensors of 16 float32."""
    return {f"layer.{number}.weight": torch.full((16,), float(number)) for number in range(count)}
