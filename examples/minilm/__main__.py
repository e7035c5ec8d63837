"""Run the demo: ``python -m examples.minilm``. The exit code is 1 if a claim is false."""

import os
import sys

# Set before JAX is imported: four devices on one CPU, so that weights are sharded.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

from examples.minilm.demo import main

sys.exit(main())
