"""One real checkpoint, all-MiniLM-L6-v2, in NumPy, JAX and PyTorch: run ``python -m examples.minilm``.

- `pretrained`: where the weights are, and the sizes of the network
- `tokens`: sentences to token numbers
- `network_numpy`, `network_jax`, `network_torch`: the same network three times, over the same names
- `interrupted`: a save that is killed half-way
- `report`: what the demo prints
- `demo`: the whole story
"""
