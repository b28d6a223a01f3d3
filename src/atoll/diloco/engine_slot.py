"""The place of a session's engine: there before the session is, so that membership has somebody to call.

`joining` makes it for membership's callbacks, which run on membership's thread and find it empty until the training
thread has opened an engine. The session owns it, and closes it.
"""

from __future__ import annotations

from atoll.comm.native import NativeCommunicator, Tls
from atoll.comm.prober import ProbeOrder, Prober, ReachOrder
from atoll.diloco.exchange import Exchange
from atoll.diloco.ranked_member import AnyMember
from atoll.errors import ConfigError
from atoll.membership.client import Admission
from atoll.membership.messages import Probe, Probed, Reach, Reached
from atoll.network.addresses import EngineAddress
from atoll.network.line import Line
from atoll.values import OpId


class EngineSlot:
    """The engine, its prober and the exchange, once there are any. Membership's thread tells them of aborts, of a new
    session key, that others catch up, and that links are to be measured."""

    def __init__(self) -> None:
        self.comm: NativeCommunicator | None = None
        self.prober: Prober | None = None
        self.exchange: Exchange | None = None

    # ---- the training thread -------------------------------------------------------------------------------------

    def open_engine(
        self,
        *,
        run: str,
        peer: str,
        member: AnyMember,
        admission: Admission,
        engine: EngineAddress,
        line: Line,
        rank: int = 0,
        tls: Tls | None = None,
    ) -> NativeCommunicator:
        """The engine listens, and, at rank 0, links can be measured. Further ranks take the ports after the engine's,
        if that was chosen; `line` is this rank's share. With `tls` links are TLS. Raises ConfigError if the system
        lacks the line's congestion control."""
        try:
            self.comm = NativeCommunicator(
                run=run,
                peer=peer,
                rank=rank,
                session_key=admission.session_key,
                bind_host=engine.bind,
                port=engine.port + rank if engine.port else 0,
                connect_timeout_s=admission.timeouts.connect_s,
                progress_timeout_s=admission.timeouts.progress_timeout_s,
                congestion=line.congestion,
                max_up_bytes_per_s=line.max_up,
                max_down_bytes_per_s=line.max_down,
                tls=tls,
            )
        except ValueError as error:
            raise ConfigError(f"net.congestion: {error}") from None
        if rank == 0:
            self.prober = Prober(
                peer,
                self.comm,
                lambda links, failed: member.probed(Probed(links, failed)),
                lambda where, failed: member.probed(Reached(where, failed)),
            )
        return self.comm

    def close(self) -> None:
        if self.comm is not None:
            self.comm.close()
        if self.prober is not None:
            self.prober.close()
        if self.exchange is not None:
            self.exchange.close()

    # ---- membership's thread -------------------------------------------------------------------------------------

    def abort(self, op: OpId) -> None:
        if self.comm is not None:
            self.comm.abort(op)

    def renew_key(self, session_key: bytes) -> None:
        if self.comm is not None:
            self.comm.set_session_key(session_key)
        if self.exchange is not None:
            self.exchange.renew_key(session_key)

    def serve(self) -> None:
        if self.exchange is not None:
            self.exchange.serve()

    def probe(self, order: Probe | Reach) -> None:
        if self.prober is None:
            return
        if isinstance(order, Reach):
            self.prober.begin(ReachOrder(order.targets, order.trial_s))
        else:
            self.prober.begin(ProbeOrder(order.targets, order.num_bytes, order.connections, order.link_s))
