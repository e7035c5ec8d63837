"""``python -m examples.with_orbax``: runs the demo; its exit code is 1 if a claim does not hold."""

import logging
import os
import sys

# Before anything imports JAX: four devices on one CPU, for weights that are really spread out.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells every phase

from examples.with_orbax.demo import main

sys.exit(main())
