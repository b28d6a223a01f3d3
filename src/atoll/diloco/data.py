"""What rounds and the data that is read have to say to each other."""

from __future__ import annotations

from typing import Protocol

from atoll.membership.leases import Reads


class Data(Protocol):
    """What rounds need of data that is leased (`train.batches.Batches`)."""

    num_slots: int
    """0: nothing has to be leased."""
    own_data: str
    """The digest of data that this peer reads alone, "" if it does not."""

    def reads(self) -> Reads:
        """What was read since the leases were dealt, as of the last step."""
        ...

    def wish(self, steps: int) -> int:
        """How many slots it wishes to hold for a round of so many steps."""
        ...

    def begin(self) -> None:
        """Read from what is leased; work that was under way is lost."""
        ...

    def settle(self) -> None:
        """A round has ended; what was read is read for good, and the leases are others."""
        ...

    def go_on(self) -> None:
        """A round has ended without a commit; what was read is part of the next one."""
        ...

    def is_unbroken(self) -> bool:
        """Whether work may still count: nobody else was leased what it read."""
        ...


class NoData:
    """For training whose data is nobody else's concern."""

    num_slots = 0
    own_data = ""

    def reads(self) -> Reads:
        return ()

    def wish(self, steps: int) -> int:
        return 0

    def begin(self) -> None: ...
    def settle(self) -> None: ...
    def go_on(self) -> None: ...

    def is_unbroken(self) -> bool:
        return True
