"""The coordinator's process: one that leads from its first moment, or one of several that lead in turn.

With the journal in a file there is one (`membership.service`). With the journal in etcd there may be several; those
that do not lead stand by (`membership.standby`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from atoll.addresses import join_address
from atoll.clock import MonotonicClock
from atoll.errors import ConfigError
from atoll.events import EventLog
from atoll.membership import auth, coordinator, steps
from atoll.membership.coordinator_draft import MakeLanes
from atoll.membership.etcd_journal import Contender
from atoll.membership.etcd_place import EtcdPlace
from atoll.membership.journal import Journal, JournalFile
from atoll.membership.listening import listening
from atoll.membership.messages import Scalar
from atoll.membership.register import Register
from atoll.membership.registrar import Trust
from atoll.membership.service import STOPPED, Service
from atoll.membership.settings import CoordinatorSettings
from atoll.membership.standby import lead_in_turn
from atoll.membership.steps import JournalRecord, TokenMade


async def serve(
    settings: CoordinatorSettings,
    *,
    host: str,
    port: int,
    token: bytes = b"",
    trust: Trust | None = None,
    first_tokens: Sequence[TokenMade] = (),
    new_run: bool = False,
    journal_path: Path | EtcdPlace,
    run_settings: dict[str, Scalar] | None,
    nested_settings: dict[str, Any] | None,
    events: EventLog,
    make_lanes: MakeLanes,
    ready: Callable[[str, int], None],
    stop: asyncio.Event,
    advertise: str = "",
) -> tuple[int, str]:
    """Coordinate one run until it is over or `stop` is set; returns the exit code and the reason.

    `run_settings` are the flat settings that declarations are compared with, `nested_settings` the same as
    newcomers receive them (None: the first peer defines the run). `ready(host, port)` is called once
    connections are accepted. When stopped, peers are told nothing: they go on and reconnect to the next
    coordinator with this journal. With the journal in etcd this coordinator stands by while another leads;
    `advertise` is the host to show to others by then (default: where it listens). Raises LocalError (port or
    journal), ConfigError (token) and Unreachable (no etcd).

    With `trust` everything is TLS, and tokens are those of the journal; one without any begins with `first_tokens`, and
    a `new_run` has to (ConfigError). Without `trust` there is one `token`, known to all.
    """
    if trust is None:
        auth.check_token(token)

    def new_register() -> Register:
        return Register() if trust else Register.of_one(token)

    async def lead(journal: Journal) -> tuple[int, str]:
        has_tokens = any(isinstance(record, TokenMade) for record in journal.records)
        if has_tokens and new_run:
            raise ConfigError(
                f"the journal in {journal_path} is that of a run with an authority already; take back what --new has "
                "made here, and copy that run's authority.pem instead"
            )
        register = new_register()
        for made in () if has_tokens else first_tokens:
            journal.append(made)
            register.learn(made)
        service = Service(settings, register, trust, journal, nested_settings, events, make_lanes)
        service.begin(run_settings)
        return await service.run(listeners, ready, stop)

    def foresee(records: Sequence[JournalRecord]) -> steps.Finish | None:
        begun = coordinator.start(settings, records, b"", run_settings, MonotonicClock().now_s())
        return next((effect for effect in begun.effects if isinstance(effect, steps.Finish)), None)

    if isinstance(journal_path, Path):
        with contextlib.closing(JournalFile(journal_path, settings.run)) as journal:
            with listening(host, port) as listeners:
                return await lead(journal)
    with listening(host, port) as listeners:
        bound_host, bound_port = listeners[0].getsockname()[:2]
        address = join_address(advertise or bound_host, bound_port)
        ended = await lead_in_turn(
            Contender(journal_path, settings.run, address, settings.lease_s),
            settings.run,
            lead,
            foresee=foresee,
            listeners=listeners,
            events=events,
            connect_s=settings.timeouts.connect_s,
            register=new_register,
            trust=trust,
            stop=stop,
        )
        return ended or (STOPPED, "stopped on request, while another coordinator led")
