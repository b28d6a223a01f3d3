"""Slots leased in this process: among the virtual peers of a simulated run, or to a peer whose data is its own."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from atoll.membership import leases
from atoll.membership.leases import Reads, SlotTable


class LeasesHere:
    """One table, by the rules of the coordinator."""

    def __init__(self, count: int, seed: int) -> None:
        self._table = SlotTable(count=count, seed=seed)

    def begin(self, wishes: Mapping[str, int]) -> None:
        """The run starts with these peers."""
        self._table = leases.top_up(self._table, wishes)

    def conclude(self, reads: Mapping[str, Reads], wishes: Mapping[str, int]) -> None:
        """A round is committed."""
        self._table = leases.settle(self._table, reads, wishes)

    def go_on(self, reads: Mapping[str, Reads], wishes: Mapping[str, int]) -> None:
        """A round is skipped, and all that was read is part of the next one."""
        more = {peer: wishes[peer] + leases.finished(each) for peer, each in reads.items()}
        self._table = leases.drop(self._table, {}, more)

    def restore(self, table: SlotTable) -> None:
        self._table = table

    def of(self, peer: str) -> OneOfSeveral:
        return OneOfSeveral(self, peer)

    def slots(self) -> SlotTable:
        return self._table

    def want(self, peer: str, more: int) -> bool:
        self._table = leases.top_up(self._table, {peer: len(self._table.held(peer)) + more})
        return True


class OneOfSeveral:
    """A `Leaser` for one of several peers; whoever runs them all concludes the rounds."""

    def __init__(self, here: LeasesHere, peer: str) -> None:
        self._here, self._peer = here, peer

    def slots(self) -> SlotTable:
        return self._here.slots()

    def want_slots(self, more: int) -> bool:
        return self._here.want(self._peer, more)

    def read_for_good(self, peer: str, reads: Reads, wish: int) -> None: ...


class OwnSlots:
    """A `Leaser` for a peer that reads data of its own (`data.scope` "own"): nobody else has to know of it. Its
    positions are saved with its own part, and fit the text whose digest is `text` alone."""

    def __init__(self, count: int, seed: int, peer: str, text: str) -> None:
        self._here, self._peer, self._text = LeasesHere(count, seed), peer, text
        self._here.begin({peer: count})

    def slots(self) -> SlotTable:
        return self._here.slots()

    def want_slots(self, more: int) -> bool:
        return self._here.want(self._peer, more)

    def read_for_good(self, peer: str, reads: Reads, wish: int) -> None:
        self._here.conclude({peer: reads}, {peer: self._here.slots().count})

    def state_dict(self) -> dict[str, object]:
        return {"text": self._text, "table": msgspec.to_builtins(self._here.slots())}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Raises ValueError if it is of other data."""
        if state_dict["text"] != self._text:
            raise ValueError("it tells how far another text was read")
        table = msgspec.convert(state_dict["table"], SlotTable)
        if why := leases.contradiction(table, self._here.slots().count):
            raise ValueError(why)
        self._here.restore(table)
