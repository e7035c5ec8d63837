"""Run the demo: ``python -m examples.with_ray``. The exit code is 1 if a claim is false."""

import argparse
import os
import sys

# Set before Ray is imported.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from examples.with_ray.demo import main

parser = argparse.ArgumentParser(prog="python -m examples.with_ray", description="a run on Ray that loses a worker")
parser.add_argument("--steps", type=int, default=30, help="how long to train, 6 at least")
sys.exit(main(parser.parse_args().steps))
