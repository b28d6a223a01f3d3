"""A run's commits, made up but exact: for tests of updates and of catching up."""

from __future__ import annotations

import numpy as np

from atoll import kernels
from atoll.plan.grid import Grid
from atoll.recovery.update import Update, replay
from atoll.state.snapshot import LoadedState
from atoll.values import Contribution, OpId
from support.states import copy_of, digest_of

INNER_STEPS = 10


class History:
    """The state of a run, its updates and digests by version. Every third round is skipped, as rounds may be."""

    def __init__(self, numel: int, codec: str = "int8", seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self.grid = Grid.of([numel - numel // 3, numel // 3])
        self.codec = codec
        anchor = self._rng.standard_normal(numel, dtype=np.float32)
        self.state = LoadedState(anchor, np.zeros(numel, dtype=np.float32), version=0, round=0, step=0)
        self.start = copy_of(self.state)
        self.updates: dict[int, tuple[Update, kernels.Bytes]] = {}
        self.digests = {0: digest_of(self.state)}

    def commit(self) -> tuple[Update, kernels.Bytes]:
        state = self.state
        skipped = int(state.round % 3 == 2)
        data = np.empty(self.grid.wire_bytes(self.codec), dtype=np.uint8)
        mean = self._rng.standard_normal(self.grid.numel, dtype=np.float32)
        assert kernels.encode(self.codec, self.grid.boundaries, mean, data)
        number = state.round + skipped + 1
        update = Update(
            version=state.version + 1,
            op=OpId(1, number),
            round=number,
            step=state.step + skipped * INNER_STEPS,
            inner_steps=INNER_STEPS,
            lr=0.7,
            momentum=0.9,
            nesterov=True,
            codec=self.codec,
            contributions=(Contribution("p0", 1), Contribution("p1", 2)),
            boundaries=tuple(self.grid.boundaries.tolist()),
            wire_bytes=data.size,
            result_digest=kernels.digest_bytes(data).hex(),
        )
        replay(state, update, data)
        self.updates[state.version] = (update, data)
        self.digests[state.version] = digest_of(state)
        return update, data

    def at(self, version: int) -> LoadedState:
        state = copy_of(self.start)
        for step in range(1, version + 1):
            replay(state, *self.updates[step])
        return state
