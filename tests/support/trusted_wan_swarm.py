"""A run with an authority on an emulated wide-area network: the way a run over the internet is."""

from __future__ import annotations

from support.swarm import Peer
from support.trusted_swarm import TrustedSwarm
from support.wan_swarm import WanSwarm


class TrustedWanSwarm(WanSwarm, TrustedSwarm):
    """A swarm at the lab's sites in which everything is TLS."""

    def placed(self, command: list[str]) -> list[str]:
        return WanSwarm.placed(self, TrustedSwarm.placed(self, command))

    def quadratic(self, name: str, center: float, *arguments: object) -> Peer:  # type: ignore[override]
        trust = ["--authority", self.authority.fingerprint, "--token-file", self.token_file]
        return WanSwarm.quadratic(self, name, center, *trust, *arguments)
