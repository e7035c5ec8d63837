"""Ray actors train and save together. One is killed and restarted with an empty disk; the result is the same.

    python -m examples.with_ray [--steps N]

The model is linear, in NumPy, and the driver averages the gradients of the workers. Every worker has its own file of
examples on its own disk, and its own random generator.
"""
