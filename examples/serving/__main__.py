"""Run the demo: ``python -m examples.serving``. The exit code is 1 if a claim is false."""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

from examples.serving.demo import main

if __name__ == "__main__":  # the process of the server imports this module again
    sys.exit(main())
