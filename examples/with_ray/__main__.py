"""``python -m examples.with_ray``: runs the demo; its exit code is 1 if a claim does not hold."""

import argparse
import os
import sys

# Before anything imports Ray.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from examples.with_ray.demo import main

parser = argparse.ArgumentParser(prog="python -m examples.with_ray", description="a run on Ray that loses a worker")
parser.add_argument("--steps", type=int, default=30, help="how long to train, 6 at least")
sys.exit(main(parser.parse_args().steps))
