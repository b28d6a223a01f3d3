"""A session's checkpoints: what is saved at safe points, and what a session goes on from.

A save is taken at the safe point after a commit, where the weights are the anchor and nothing is under way; and what
was taken there is handed out at the same line, or before: a resumed loop goes on as if it had never stopped. All calls
are on the training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from atoll import log
from atoll.checkpoint.description import DESCRIPTION, Description, write_description
from atoll.checkpoint.folder import CheckpointFolder
from atoll.checkpoint.own_part import OwnPart, Stateful, Taken, random_states, set_random_states
from atoll.checkpoint.resume import Resumption, fetch_latest, newest
from atoll.checkpoint.saver import Keeping, Saver
from atoll.checkpoint.trees import put_together
from atoll.diloco.exchange import Exchange
from atoll.diloco.outer import OuterState
from atoll.diloco.outer_loop import OuterLoop
from atoll.diloco.own_ranks import RankedPart, part_of_rank
from atoll.diloco.resuming import Found, is_of, read_ranges
from atoll.diloco.scribe import Page, write_state
from atoll.errors import LocalError
from atoll.events import Event, Resumed
from atoll.mesh.crew import LONG_S, Crew
from atoll.state.elsewhere import OwnBytes
from atoll.state.layout import Layout
from atoll.state.snapshot import LoadedState

LAST_SAVE_S: Final = 300.0
"""The longest that an exit waits for the last save; the writer then goes on by itself."""
RANDOM: Final = "random"

_log = log.get(__name__)


class Safekeeping:
    """Made when a session opens; without a `keeping` it does nothing."""

    def __init__(
        self,
        keeping: Keeping | None,
        *,
        run: str,
        peer: str,
        emit: Callable[[Event], None],
        fresh: bool,
        crew: Crew | None = None,
    ) -> None:
        """`fresh`: what is there is not read, and replaced version by version. With several ranks (`crew`) all of them
        call the methods here at the same line; rank 0 has the writer."""
        self._crew = crew or Crew.alone()
        self._keeping, self._run, self._peer, self._emit, self._fresh = keeping, run, peer, emit, fresh
        self._saver: Saver | None = None
        self._exchange: Exchange | None = None
        self._own = OwnPart()
        self._loaded: LoadedState | None = None
        self._others: dict[str, dict[str, Any]] = {}
        self._dropped = False
        self._found = Found()
        self._waiting: dict[str, Any] = {}  # what was saved, and nobody asked for yet
        self._tensors: dict[str, torch.Tensor] = {}
        self._remarks: list[str] = []
        self._handled = (0, -1)  # (term, version): after a roll-back the same number is made again
        self._settled = False

    # ---- going on --------------------------------------------------------------------------------------------------

    def resume(self, state: OuterState) -> bool:
        """Load the newest checkpoint into `state`, if there is one. Raises LocalError if it is another run's."""
        keeping, crew = self._keeping, self._crew
        if keeping is None or self._fresh:
            return False
        found = crew.decide(Found, lambda: self._find(keeping, state), within_s=LONG_S)
        if not found.folder:
            return False
        if crew.num_ranks == 1:
            assert self._loaded is not None
            state.anchor[:], state.velocity[:] = self._loaded.anchor, self._loaded.velocity
        else:
            crew.agree(bool, lambda: read_ranges(Path(found.folder), state))
        self._loaded = None
        state.version, state.round, state.step = found.version, found.round, found.step
        self._found = found
        self._remarks = list(found.remarks)
        if found.own:
            self._waiting, remark = part_of_rank(found.own_state, crew.rank, crew.num_ranks)
            self._remarks += [remark] if remark else []
            crew.agree(bool, lambda: self._read_own(found.own, every=bool(remark)))
        return True

    def _read_own(self, path: str, *, every: bool) -> bool:
        """The tensors of this rank, or of all, from a file that rank 0 has checked. Raises LocalError."""
        prefix = f"rank{self._crew.rank}/" if self._crew.rank else ""
        try:
            with safe_open(path, "pt") as file:
                names = [name for name in file.keys() if every or is_of(name, prefix)]  # noqa: SIM118
                self._tensors = {name: file.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise LocalError(f"{path} cannot be read: {error}; do all ranks see checkpoint.path?") from None
        return True

    def _find(self, keeping: Keeping, state: OuterState) -> Found:
        """On rank 0."""
        found = self._newest(keeping.path, state)
        if found is None and self._fetch(keeping):
            found = self._newest(keeping.path, state)
        if found is None:
            return Found()
        self._loaded, self._others = found.state, found.others
        manifest, path = found.own or (None, "")
        return Found(
            folder=str(CheckpointFolder(keeping.path).shared(found.state.version)),
            version=found.state.version,
            round=found.state.round,
            step=found.state.step,
            term=found.term,
            own=str(path),
            own_state=manifest.state if manifest is not None else {},
            remarks=found.remarks,
        )

    def _fetch(self, keeping: Keeping) -> bool:
        return bool(keeping.remote) and fetch_latest(keeping.remote, keeping.path, self._peer, self._emit)

    def _newest(self, path: Path, state: OuterState) -> Resumption | None:
        return newest(path, run=self._run, peer=self._peer, numel=state.numel, emit=self._emit)

    @property
    def saves(self) -> bool:
        return self._keeping is not None

    @property
    def has_own_part(self) -> bool:
        """Whether the inner optimizer goes on with what it knew."""
        return bool(self._found.own) and not self._dropped

    @property
    def term(self) -> int:
        """The term under which the version that this peer begins with was committed; 0 for a new one."""
        return self._found.term

    def others(self, name: str) -> dict[str, Any]:
        """What other peers' parts of the same checkpoint, as far as they lie here, hold under this name; by peer."""
        return {peer: put_together(state[name], {}) for peer, state in self._others.items() if name in state}

    def remark(self, sentence: str) -> None:
        """Something to be told about how this peer resumed."""
        self._remarks.append(sentence)

    def hold(
        self,
        name: str,
        take: Callable[[], Any],
        give: Callable[[Any], Any],
        drop: Callable[[], None] | None = None,
    ) -> None:
        """A part of this peer's own: saved from now on, and handed out at once if it was saved. With a `drop` it is put
        together in host memory, and either all ranks take it or all of them drop it."""
        self._own.hold(name, take, give)
        if name not in self._waiting or name == RANDOM:
            return
        said, why = self._waiting.pop(name), ""
        try:
            give(put_together(said, self._tensors, "cpu" if drop is not None else ""))
        except (ValueError, KeyError, TypeError, RuntimeError, AssertionError) as error:
            why = str(error) or type(error).__name__
        if drop is not None and (bad := [each for each in self._crew.share(str, why) if each]):
            why, self._dropped = bad[0], True
            drop()
        if why:
            self.remark(f"what was saved of {name} does not fit and is dropped: {why}")

    def hold_stateful(self, name: str, each: Stateful) -> None:
        self.hold(name, each.state_dict, each.load_state_dict)

    # ---- saving ----------------------------------------------------------------------------------------------------

    def open(self, exchange: Exchange, loop: OuterLoop, layout: Layout) -> None:
        """The session has an engine and a loop; what it holds may be saved."""
        if self._keeping is None:
            return
        self._exchange = exchange
        if self._crew.is_lead:
            self._describe(self._keeping, layout)
        self._handled = (self.term, loop.state.version)
        self.hold(RANDOM, random_states, set_random_states)
        if exchange.staging is not None:
            self._saver = Saver(
                self._keeping, run=self._run, peer=self._peer, staging=exchange.staging, emit=self._emit
            )
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
        if self._exchange is None:
            return
        if not self._settled:
            self._settle(loop)
        if self._saver is not None:
            self._saver.look()
        last = loop.last_commit
        if last is None or not last.saves or (last.term, last.version) <= self._handled:
            return
        self._handled = (last.term, last.version)
        if last.version != loop.state.version:
            self._skip(last.version, f"the run went on to version {loop.state.version} first")
        elif loop.steps_in_round:
            why = "no safe point came between its commit and the next inner step; call session.safe_point() there"
            self._skip(last.version, why)
        else:
            self._save(loop)

    def _skip(self, version: int, why: str) -> None:
        if self._saver is not None:
            self._saver.skip(version, why)

    def finish(self, loop: OuterLoop) -> None:
        """The loop is over: its last version is saved, whether or not it was named."""
        last = loop.last_commit
        if self._exchange is None or last is None or (last.term, last.version) <= self._handled:
            return
        if last.version == loop.state.version and not loop.steps_in_round and last.uploader:
            self._handled = (last.term, last.version)
            if self._saver is not None:
                self._saver.wait(LAST_SAVE_S)
            self._save(loop)

    def part(self, loop: OuterLoop) -> None:
        """The run can not go on, or not with this peer: what it holds is kept, if no save has it. Inside a round that
        is the anchor and its momentum, without a part of its own: weights and inner optimizer are ahead of them."""
        last = loop.last_commit
        if self._exchange is None or last is None or not last.uploader or last.version != loop.state.version:
            return
        version, term = last.version, last.term
        if not self._crew.decide(bool, lambda: self._has(version, term), within_s=LONG_S):
            self._save(loop, with_own=not loop.steps_in_round)

    def close(self, patience_s: float = LAST_SAVE_S) -> None:
        if self._saver is not None:
            self._saver.close(patience_s)

    def _has(self, version: int, term: int) -> bool:
        """On rank 0: whether a save has this version. If none has, there is room for one now."""
        assert self._saver is not None
        self._saver.look()
        if self._saver.has(version, term):
            return True
        self._saver.wait(LAST_SAVE_S)
        return False

    def _save(self, loop: OuterLoop, *, with_own: bool = True) -> None:
        last, exchange = loop.last_commit, self._exchange
        assert last is not None
        assert exchange is not None

        def is_free() -> bool:
            assert self._saver is not None
            return self._saver.is_free(last.version)

        if not self._crew.decide(bool, is_free, within_s=LONG_S):  # rank 0 may wait for the save before
            return
        state = loop.state
        taken: Taken | RankedPart | None = None
        try:
            if with_own:
                alone = self._crew.num_ranks == 1
                taken = self._own.take() if alone else RankedPart(self._own, self._crew)
        except LocalError as error:
            if self._saver is not None:
                self._saver.fail(last.version, str(error))
            return

        def work() -> None:
            own: Sequence[OwnBytes] = []
            if taken is not None:
                own = taken.parts if isinstance(taken, Taken) else taken.parts(exchange.scribe)
            assert self._saver is not None
            self._saver.save(
                state,
                state.tables,
                own,
                msgspec.json.encode(taken.state) if taken is not None else b"",
                digest=last.digest,
                term=last.term,
                uploads=last.uploader == self._peer,
                put=exchange.put_state if self._crew.num_ranks > 1 else None,
            )

        def write_own(page: Page) -> None:
            assert isinstance(taken, RankedPart)
            taken.write(page, is_lead=self._crew.is_lead)

        if self._crew.num_ranks > 1 and state.tables is None:
            state.digest()
        exchange.scribe.together({"state": lambda page: write_state(page, state), "own": write_own}, work)

    def _settle(self, loop: OuterLoop) -> None:
        self._settled = True
        found = self._found
        if not found.folder:
            return
        if RANDOM in self._waiting:
            set_random_states(put_together(self._waiting.pop(RANDOM), self._tensors))
        if self._waiting:
            self.remark(f"nothing here takes what was saved of {', '.join(sorted(self._waiting))}: dropped")
        if loop.state.version != found.version:
            self.remark(f"the run stands at version {loop.state.version}, which was fetched from other peers")
        assert self._keeping is not None
        self._emit(
            Resumed(
                version=found.version,
                step=found.step,
                path=str(self._keeping.path),
                own_part=self.has_own_part,
                remarks=tuple(self._remarks),
            )
        )
        self._tensors, self._waiting, self._others = {}, {}, {}
