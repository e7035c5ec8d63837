"""``python -m examples.minilm``: runs the demo; its exit code is 1 if a claim does not hold."""

import os
import sys

# Before anything imports JAX: four devices on one CPU, for weights that are really spread out.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

from examples.minilm.demo import main

sys.exit(main())
