"""Write the golden adapters in this directory with PEFT. Run this program by hand: the tests only read the files.

    python generate.py

Written with peft 0.21.2, transformers 5.23.0, safetensors 0.8.0 and torch 2.13.0. The elements of
the n-th tensor of an adapter, in the order of names, are n, n + 1, ... modulo 100, in C order.
"""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

HERE = Path(__file__).resolve().parent


class Model(torch.nn.Module):
    """A model with all kinds of layers that LoRA supports."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.mix = torch.nn.Conv1d(4, 4, 3)
        self.inner = torch.nn.ModuleDict({"query": torch.nn.Linear(4, 4), "value": torch.nn.Linear(4, 4)})
        self.head = torch.nn.Linear(4, 2)


CONFIGS = {
    "everything": LoraConfig(r=2, target_modules=["embed", "mix", "query"], modules_to_save=["head"]),
    "dora_and_biases": LoraConfig(r=2, target_modules=["mix", "value"], use_dora=True, bias="all"),
    "biases_of_its_own": LoraConfig(r=2, target_modules=["query"], lora_bias=True, bias="lora_only"),
    "tokens": LoraConfig(r=2, target_modules=["value"], trainable_token_indices={"embed": [1, 3]}),
}


def main() -> None:
    for name, config in CONFIGS.items():
        model = get_peft_model(
            Model().to(torch.bfloat16 if name == "everything" else torch.float32), config, autocast_adapter_dtype=False
        )
        state = get_peft_model_state_dict(model, save_embedding_layers=False)
        for number, key in enumerate(sorted(state)):
            numbers = (torch.arange(state[key].numel()) + number) % 100
            state[key].copy_(numbers.reshape(state[key].shape))
        model.save_pretrained(HERE / name, save_embedding_layers=False)
        (HERE / name / "README.md").unlink()


if __name__ == "__main__":
    main()
