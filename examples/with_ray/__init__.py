"""Ray actors train and save together; one is killed, started again with an empty disk, and the run gives what it would have.

    python -m examples.with_ray [--steps N]

A linear model in NumPy, whose gradients the driver averages. Every worker draws its examples from a file that it makes
on a disk of its own, by a random generator of its own.
"""
