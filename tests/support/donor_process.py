"""A trainer that is nothing but a donor, as a process of its own: to be killed, frozen, and asked meanwhile.

Stages a state of --numel ones, keeps one update, serves, and prints its port, its sidecar's pid and its folder. With
--child it has a child of its own that inherits all it can and outlives it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from atoll.recovery.folder import RAM
from atoll.state.snapshot import LoadedState
from support.donating import new_donor, within


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--numel", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--ram", type=Path, default=RAM)
    args = parser.parse_args()
    donor = new_donor(args.folder, ram=args.ram)
    ones = np.ones(args.numel, dtype=np.float32)
    assert donor.stage(LoadedState(ones, ones, version=1, round=1, step=10))
    donor.start_serving()
    if args.child and os.fork() == 0:
        os.closerange(0, 3)
        time.sleep(30)
        os._exit(0)
    within(10.0, lambda: donor.pid, "the sidecar")
    print(donor.port, donor.pid, donor.folder, flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
