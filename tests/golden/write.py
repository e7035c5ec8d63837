"""Write missing golden checkpoints: ``python -m tests.golden.write [DIRECTORY]``.

Existing ones are not replaced, because they show that checkpoints of earlier versions still load.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.golden.features import FEATURES, save_feature

if __name__ == "__main__":
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "checkpoints"
    directory.mkdir(exist_ok=True)
    for name in FEATURES:
        if not (directory / name).exists():
            save_feature(name, directory)
            print(f"wrote {directory / name}")
    for administration in directory.rglob(".ckptcore"):
        shutil.rmtree(administration)  # it contains processes and times, which differ each time
    shutil.rmtree(directory / "hosts" / "far", ignore_errors=True)
