"""`atoll ARGUMENTS`, whose inner step with the given number is one native call that never returns and that no signal
interrupts: `blocked_train.py MARKER STEP ARGUMENTS...`. The marker is written when it is there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from atoll.cli.main import main
from atoll.train.inner import InnerStep
from support.blocked import block


def block_in_step(number: int, marker: Path) -> None:
    original, made = InnerStep.step, []

    def step(self: InnerStep, *given: Any) -> Any:
        made.append(None)
        if len(made) == number:
            block(marker.touch)
        return original(self, *given)

    InnerStep.step = step  # type: ignore[method-assign]


if __name__ == "__main__":
    block_in_step(int(sys.argv[2]), Path(sys.argv[1]))
    del sys.argv[1:3]
    main()
