"""One real checkpoint, all-MiniLM-L6-v2, in NumPy, JAX and PyTorch: run ``python -m examples.minilm``.

- `pretrained`: the directory of the weights, and the sizes of the network
- `tokens`: conversion of sentences to token numbers
- `network_numpy`, `network_jax`, `network_torch`: the same network three times, with the same names
- `interrupted`: a save that is killed
- `report`: the output of the demo
- `demo`: the whole demo
"""
