"""A trainer in PyTorch and a server in JAX, which follows its weights: run ``python -m examples.serving``.

- `network`: the sizes of the network, and its data, without a framework
- `trainer`: trains in PyTorch, and publishes a version of the weights after every few steps
- `server`: follows the versions in JAX, in another process, and answers with each
- `demo`: the whole demo
"""
