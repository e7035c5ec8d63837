"""``python -m examples.handover``: runs the demo; its exit code is 1 if a claim does not hold."""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

from examples.handover.demo import main

sys.exit(main())
