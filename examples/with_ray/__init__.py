"""Ray actors train and save together. One is killed and restarted with an empty disk; the result is the same.

    python -m examples.with_ray [--steps N]

A linear model in NumPy, whose gradients the driver averages. Every worker has its own file of examples on its own disk,
and its own random generator.
"""
