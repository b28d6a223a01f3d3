"""Error feedback: what a lossy codec dropped is kept, and sent with the next update.

With the *residual* e, a share beta of it, and an update delta, a round sends q = codec(delta + beta * e), and what q
does not carry becomes the next residual: e' = delta + beta * e - q. So no part of an update is lost for ever, only
late: over rounds, sum of beta^(t-s) q_s, plus e_t, is the sum of beta^(t-s) delta_s.
(Seide et al. 2014; Karimireddy et al. 2019, arXiv 1901.09847.)

The residual moves only when q was added to a committed sum. A round that is aborted, or that leaves this peer out,
changes nothing here. It is host memory, 4 bytes a parameter where beta > 0, and the peer's own: no digest covers it.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from atoll.kernels import Bytes, Floats, Int64s
from atoll.runs import Runs
from atoll.values import CODECS

Share = float | Literal["auto"]


def chosen_beta(codec: str, error_feedback: Share) -> float:
    """The share of the residual that is sent again: as the run says, or the codec's own."""
    return CODECS[codec].feedback if error_feedback == "auto" else error_feedback


class ErrorFeedback:
    """One rank's residual. Used on the training thread, by the round that encodes and commits."""

    def __init__(self, codec: str, boundaries: Int64s, beta: float) -> None:
        """`boundaries` are the grid's. `beta` is in [0, 1]; with 0 nothing is kept and nothing allocated."""
        self._codec, self._beta = codec, beta
        self._runs = Runs.of_whole(boundaries)
        self.residual: NDArray[np.float32] | None = None
        if beta > 0:
            self.residual = np.zeros(int(boundaries[-1]), dtype=np.float32)

    @property
    def runs(self) -> Runs:
        """How an update lies on the wire."""
        return self._runs

    def follow(self, runs: Runs) -> None:
        """From now on updates are encoded in this order, and on this grid. What is owed stays: it lies in the order of
        the vector. An update that is not committed yet has to be encoded once more."""
        self._runs = runs

    def encode(self, delta: Floats, out: Bytes) -> bool:
        """Write the wire bytes of the update and of what is owed. False if that is not finite; nothing is kept yet."""
        if self.residual is None:
            return self._runs.encode(self._codec, delta, out)
        return self._runs.encode_with_feedback(self._codec, delta, self.residual, self._beta, out)

    def commit(self, delta: Floats, data: Bytes) -> None:
        """`data`, which `encode` made of `delta`, is in a committed sum: keep what it did not carry."""
        if self.residual is not None:
            self._runs.update_residual(self._codec, delta, self._beta, data, self.residual)

    def restore(self, residual: Floats) -> None:
        """Go on with what was owed before. Raises ValueError if it is not of this size."""
        if self.residual is not None:
            self.residual[:] = residual

    def reset(self) -> None:
        """Forget what is owed, as when it is not finite any more."""
        if self.residual is not None:
            self.residual[:] = 0
