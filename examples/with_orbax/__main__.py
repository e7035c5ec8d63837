"""Run the demo: ``python -m examples.with_orbax``. The exit code is 1 if a claim is false."""

import logging
import os
import sys

# Set before JAX is imported: four devices on one CPU, so that weights are sharded.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax logs every phase

from examples.with_orbax.demo import main

sys.exit(main())
