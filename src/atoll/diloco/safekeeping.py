"""A session's checkpoints: what is saved at safe points, and what a session goes on from.

A save is taken at the safe point after a commit, where the weights are the anchor and nothing is under way; and what
was taken there is handed out at the same line, or before: a resumed loop goes on as if it had never stopped. All calls
are on the training thread.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors.torch import load_file

from atoll import log
from atoll.checkpoint.description import DESCRIPTION, Description, write_description
from atoll.checkpoint.own_part import OwnPart, Stateful, Taken, random_states, set_random_states
from atoll.checkpoint.resume import Resumption, fetch_latest, newest
from atoll.checkpoint.saver import Keeping, Saver, Staging
from atoll.checkpoint.trees import put_together
from atoll.diloco.outer import OuterState
from atoll.diloco.outer_loop import OuterLoop
from atoll.errors import LocalError
from atoll.events import Event, Resumed
from atoll.state.layout import Layout

LAST_SAVE_S: Final = 300.0
"""The longest that an exit waits for the last save; the writer then goes on by itself."""
RANDOM: Final = "random"

_log = log.get(__name__)


class Safekeeping:
    """Made when a session opens; without a `keeping` it does nothing."""

    def __init__(
        self, keeping: Keeping | None, *, run: str, peer: str, emit: Callable[[Event], None], fresh: bool
    ) -> None:
        """`fresh`: what is there is not read, and replaced version by version."""
        self._keeping, self._run, self._peer, self._emit, self._fresh = keeping, run, peer, emit, fresh
        self._saver: Saver | None = None
        self._own = OwnPart()
        self._resumption: Resumption | None = None
        self._waiting: dict[str, Any] = {}  # what was saved, and nobody asked for yet
        self._tensors: dict[str, torch.Tensor] = {}
        self._remarks: list[str] = []
        self._handled = -1
        self._settled = False

    # ---- going on --------------------------------------------------------------------------------------------------

    def resume(self, state: OuterState) -> bool:
        """Load the newest checkpoint into `state`, if there is one. Raises LocalError if it is another run's."""
        keeping = self._keeping
        if keeping is None or self._fresh:
            return False
        found = self._newest(keeping.path, state)
        if found is None and self._fetch(keeping):
            found = self._newest(keeping.path, state)
        if found is None:
            return False
        state.anchor[:], state.velocity[:] = found.state.anchor, found.state.velocity
        state.version, state.round, state.step = found.state.version, found.state.round, found.state.step
        self._resumption = found
        self._remarks = list(found.remarks)
        if found.own is not None:
            manifest, path = found.own
            self._waiting = dict(manifest.state)
            self._tensors = load_file(path)
        return True

    def _fetch(self, keeping: Keeping) -> bool:
        return bool(keeping.remote) and fetch_latest(keeping.remote, keeping.path, self._peer, self._emit)

    def _newest(self, path: Path, state: OuterState) -> Resumption | None:
        return newest(path, run=self._run, peer=self._peer, numel=state.anchor.size, emit=self._emit)

    @property
    def saves(self) -> bool:
        return self._keeping is not None

    @property
    def has_own_part(self) -> bool:
        """Whether the inner optimizer goes on with what it knew."""
        return self._resumption is not None and self._resumption.own is not None

    @property
    def term(self) -> int:
        """The term under which the version that this peer begins with was committed; 0 for a new one."""
        return self._resumption.term if self._resumption else 0

    def others(self, name: str) -> dict[str, Any]:
        """What other peers' parts of the same checkpoint, as far as they lie here, hold under this name; by peer."""
        others = self._resumption.others if self._resumption else {}
        return {peer: put_together(state[name], {}) for peer, state in others.items() if name in state}

    def remark(self, sentence: str) -> None:
        """Something to be told about how this peer resumed."""
        self._remarks.append(sentence)

    def hold(self, name: str, take: Callable[[], Any], give: Callable[[Any], Any]) -> None:
        """A part of this peer's own: saved from now on, and handed out at once if it was saved."""
        self._own.hold(name, take, give)
        if name in self._waiting and name != RANDOM:
            said = self._waiting.pop(name)
            try:
                give(put_together(said, self._tensors))
            except (ValueError, KeyError, TypeError, RuntimeError) as error:
                self.remark(f"what was saved of {name} does not fit and is dropped: {error}")

    def hold_stateful(self, name: str, each: Stateful) -> None:
        self.hold(name, each.state_dict, each.load_state_dict)

    # ---- saving ----------------------------------------------------------------------------------------------------

    def open(self, staging: Staging, loop: OuterLoop, layout: Layout) -> None:
        """The session has an engine and a loop; what it holds may be saved."""
        if self._keeping is None:
            return
        self._describe(self._keeping, layout)
        self._handled = loop.state.version
        self.hold(RANDOM, random_states, set_random_states)
        self._saver = Saver(self._keeping, run=self._run, peer=self._peer, staging=staging, emit=self._emit)
        self._saver.start(loop.state)

    def _describe(self, keeping: Keeping, layout: Layout) -> None:
        """Not worth a run's life: without it a checkpoint is whole, but its parameters have no names."""
        said = Description(
            run=self._run,
            parameters=layout.parameters,
            config=dict(keeping.config),
            tokenizer=keeping.tokenizer,
            names=dict(keeping.names),
            adapters=keeping.adapters,
        )
        try:
            write_description(keeping.path, said)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            _log.warning("%s is not written: %s", keeping.path / DESCRIPTION, reason)

    def safe_point(self, loop: OuterLoop) -> None:
        """Save, if the last commit is to be saved; the first time, take up where the saved run stood."""
        if self._saver is None:
            return
        if not self._settled:
            self._settle(loop)
        self._saver.look()
        last = loop.last_commit
        if last is None or not last.saves or last.version <= self._handled:
            return
        self._handled = last.version
        if last.version != loop.state.version:
            self._saver.skip(last.version, f"the run went on to version {loop.state.version} first")
            return
        if loop.steps_in_round:
            why = "no safe point came between its commit and the next inner step; call session.safe_point() there"
            self._saver.skip(last.version, why)
            return
        self._save(loop)

    def finish(self, loop: OuterLoop) -> None:
        """The loop is over: its last version is saved, whether or not it was named."""
        last = loop.last_commit
        if self._saver is None or last is None or last.version <= self._handled:
            return
        if last.version == loop.state.version and not loop.steps_in_round and last.uploader:
            self._handled = last.version
            self._saver.wait(LAST_SAVE_S)
            self._save(loop)

    def part(self, loop: OuterLoop) -> None:
        """The run can not go on, or not with this peer: what it holds is kept, if no save has it. Inside a round that
        is the anchor and its momentum, without a part of its own: weights and inner optimizer are ahead of them."""
        last = loop.last_commit
        if self._saver is None or last is None or not last.uploader or last.version != loop.state.version:
            return
        self._saver.look()
        if not self._saver.has(last.version):
            self._saver.wait(LAST_SAVE_S)
            self._save(loop, with_own=not loop.steps_in_round)

    def close(self, patience_s: float = LAST_SAVE_S) -> None:
        if self._saver is not None:
            self._saver.close(patience_s)

    def _save(self, loop: OuterLoop, *, with_own: bool = True) -> None:
        saver, last = self._saver, loop.last_commit
        assert saver is not None
        assert last is not None
        if not saver.is_free(last.version):
            return
        try:
            taken = self._own.take() if with_own else Taken({}, [])
        except LocalError as error:
            saver.fail(last.version, str(error))
            return
        saver.save(
            loop.state,
            loop.state.tables,
            taken.parts,
            msgspec.json.encode(taken.state) if with_own else b"",
            digest=last.digest,
            term=last.term,
            uploads=last.uploader == self._peer,
        )

    def _settle(self, loop: OuterLoop) -> None:
        self._settled = True
        found = self._resumption
        if found is None:
            return
        if RANDOM in self._waiting:
            set_random_states(put_together(self._waiting.pop(RANDOM), self._tensors))
        if self._waiting:
            self.remark(f"nothing here takes what was saved of {', '.join(sorted(self._waiting))}: dropped")
        if loop.state.version != found.state.version:
            self.remark(f"the run stands at version {loop.state.version}, which was fetched from other peers")
        assert self._keeping is not None
        self._emit(
            Resumed(
                version=found.state.version,
                step=found.state.step,
                path=str(self._keeping.path),
                own_part=found.own is not None,
                remarks=tuple(self._remarks),
            )
        )
        self._tensors, self._waiting = {}, {}
        self._resumption = None
