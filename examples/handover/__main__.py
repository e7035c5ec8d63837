"""Run the demo: ``python -m examples.handover``. The exit code is 1 if a claim is false."""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

from examples.handover.demo import main

sys.exit(main())
