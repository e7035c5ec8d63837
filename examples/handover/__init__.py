"""A training run that begins in PyTorch and ends in JAX: run ``python -m examples.handover``.

- `digits`: the data and the sizes of the network, without a framework
- `in_torch`: the trainer in PyTorch, which is killed while it saves
- `in_jax`: the trainer in JAX, which resumes from the last committed step
- `killing`: kills a process in the middle of a save
- `demo`: the whole demo
"""
