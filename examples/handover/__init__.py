"""A training run that PyTorch begins and JAX ends: run ``python -m examples.handover``.

- `digits`: the data and the sizes of the network, which belong to no framework
- `in_torch`: the trainer in PyTorch, which is killed while it saves
- `in_jax`: the trainer in JAX, which goes on from the last step that was committed
- `killing`: how a process is killed in the middle of a save
- `demo`: the whole story
"""
