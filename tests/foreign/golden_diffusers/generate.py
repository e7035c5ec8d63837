"""Write a pipeline with variants, using diffusers and transformers. Run by hand; tests only read the result.

    python generate.py

Needs diffusers, which is not a dependency of the tests. ``save_pretrained`` writes the directory `pipeline`: each model
without a variant, and as the variant fp16. The variants of `unet` and `text_encoder` are in several files.
`older_variant` is a model with the names that diffusers 0.29 gave to a variant in several files.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import diffusers
import safetensors
import torch
import transformers
from transformers.models.clip import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

HERE = Path(__file__).resolve().parent


def _pipeline() -> diffusers.DiffusionPipeline:
    torch.manual_seed(0)
    text = CLIPTextConfig(
        hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=16,
        max_position_embeddings=8, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(4,), layers_per_block=1, cross_attention_dim=8, norm_num_groups=2,
        attention_head_dim=2, down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",), mid_block_type=None,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(block_out_channels=(4,), norm_num_groups=2, latent_channels=2, layers_per_block=1)
    words = HERE / "words"
    words.mkdir()
    (words / "vocab.json").write_text(json.dumps({"<|startoftext|>": 0, "<|endoftext|>": 1, "a</w>": 2}))
    (words / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(words / "vocab.json"), str(words / "merges.txt"))
    shutil.rmtree(words)
    return diffusers.StableDiffusionPipeline(
        vae, CLIPTextModel(text), tokenizer, unet, diffusers.DDIMScheduler(), None, None,
        requires_safety_checker=False,
    )  # fmt: skip


def _older_names(directory: Path) -> None:
    for path in directory.iterdir():
        text = path.name.replace(".index.fp16.json", ".fp16.index.json")
        renamed = re.sub(r"\.fp16(-\d+-of-\d+)\.", r"\1.fp16.", text)
        if path.suffix == ".json":
            path.write_text(re.sub(r"\.fp16(-\d+-of-\d+)\.", r"\1.fp16.", path.read_text()))
        path.rename(path.with_name(renamed))


def main() -> None:
    """Write both directories and the versions of the libraries."""
    for name in ("pipeline", "older_variant"):
        shutil.rmtree(HERE / name, ignore_errors=True)
    pipeline = _pipeline()
    pipeline.save_pretrained(HERE / "pipeline")
    pipeline.to(torch.float16)
    pipeline.unet.save_pretrained(HERE / "pipeline" / "unet", variant="fp16", max_shard_size="4KB")
    pipeline.text_encoder.save_pretrained(HERE / "pipeline" / "text_encoder", variant="fp16", max_shard_size="1KB")
    pipeline.vae.save_pretrained(HERE / "pipeline" / "vae", variant="fp16")
    pipeline.vae.save_pretrained(HERE / "older_variant", variant="fp16", max_shard_size="4KB")
    _older_names(HERE / "older_variant")
    versions = {library.__name__: library.__version__ for library in (diffusers, transformers, safetensors)}
    (HERE / "written_with.json").write_text(json.dumps(versions) + "\n")


if __name__ == "__main__":
    main()
