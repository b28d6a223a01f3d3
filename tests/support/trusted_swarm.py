"""A run with an authority: its coordinator is started with --new, its peers pin the fingerprint and prove a token."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from atoll.diloco.badge import secure_way
from atoll.membership.operator import Status
from atoll.membership.operator_link import ask_status
from atoll.network.authority import Authority
from support.swarm import Peer, Swarm, environment


class TrustedSwarm(Swarm):
    """A swarm in which everything is TLS."""

    @property
    def own(self) -> Path:
        """The coordinator's folder."""
        return self.folder / self.run

    @property
    def authority(self) -> Authority:
        return Authority.from_pem((self.own / "authority.pem").read_bytes())

    @property
    def token_file(self) -> Path:
        return self.own / "join.token"

    def placed(self, command: list[str]) -> list[str]:
        return command if (self.own / "authority.pem").exists() else [*command, "--new"]

    def trusted(
        self, name: str, center: float, *arguments: object, token_file: Path | None = None, ranks: int = 1
    ) -> Peer:
        """A peer of the quadratic that has the join line."""
        trust = ["--authority", self.authority.fingerprint, "--token-file", token_file or self.token_file]
        return self.quadratic(name, center, *trust, *arguments, ranks=ranks)

    def ordered(
        self, *arguments: str, token_file: Path | None = None, within_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """`atoll COMMAND... ADDRESS ARGUMENTS...`; the words before "@" are the command. As the organiser, or as the
        holder of `token_file`."""
        at = arguments.index("@")
        words = [*arguments[:at], self.address, *arguments[at + 1 :]]
        return subprocess.run(
            [
                *(sys.executable, "-m", "atoll", *words, "--authority", self.authority.fingerprint),
                *("--token-file", str(token_file or self.own / "admin.token")),
            ],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=within_s,
            stdin=subprocess.DEVNULL,
        )

    def status(self) -> Status:
        token = (self.own / "admin.token").read_bytes().strip()
        found = ask_status(self.address, token, secure_way(self.address, self.authority.fingerprint))
        assert isinstance(found, Status)
        return found
