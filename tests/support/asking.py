"""Asks a sidecar by hand: with proof, with a wrong one, or with none."""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

import msgspec

from atoll.recovery import proof
from atoll.recovery.donor import Donor
from atoll.recovery.held import Held
from atoll.state.snapshot import SharedState
from support.donating import KEY, RUN, key_of, name_of, stage_at, within


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Asker:
    """One connection. `ask` proves like a peer; whatever is wrong with it, a test says."""

    port: int
    donor: str = "p0"
    key: bytes = KEY
    run: str = RUN
    timeout_s: float = 20.0
    source: str = "127.0.0.1"
    nonce: bytes = bytes(16)
    count: int = 0
    connection: http.client.HTTPConnection = field(init=False)

    def __post_init__(self) -> None:
        self.connection = http.client.HTTPConnection(
            "127.0.0.1", self.port, timeout=self.timeout_s, source_address=(self.source, 0)
        )

    def __enter__(self) -> Asker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.connection.close()

    def send(self, method: str, target: str, headers: dict[str, str]) -> Answer:
        self.connection.request(method, target, headers=headers)
        response = self.connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        answer = Answer(response.status, headers, response.read())
        nonce = proof.parse_challenge(headers.get("www-authenticate", ""))
        self.nonce = nonce if nonce is not None else self.nonce
        return answer

    def headers(self, method: str, target: str, byte_range: str = "") -> tuple[dict[str, str], proof.Request]:
        self.count += 1
        asked = proof.Request(
            run=self.run,
            donor=self.donor,
            method=method,
            target=target,
            byte_range=byte_range,
            server_nonce=self.nonce,
            client_nonce=proof.new_nonce(),
            count=self.count,
        )
        headers = {"Authorization": asked.credentials(self.key)}
        return ({**headers, "Range": byte_range} if byte_range else headers), asked

    def ask(self, target: str, byte_range: str = "", method: str = "GET") -> Answer:
        """As a peer does: a stranger first, then with the nonce it was told. The reply's proof is checked."""
        if self.nonce == bytes(16):
            assert self.send("GET", "/v1/held/-1", {}).status == 401
        headers, asked = self.headers(method, target, byte_range)
        answer = self.send(method, target, headers)
        if answer.status != 401 and method != "HEAD":
            small = not target.endswith((".safetensors", ".bin")) or answer.status not in (200, 206)
            size = int(answer.headers["content-length"])
            body = answer.body if small else None
            assert asked.reply_fits(self.key, answer.headers["atoll-proof"], answer.status, size, body)
        return answer

    def held(self, after: int = -1) -> Held:
        answer = self.ask(f"/v1/held/{after}")
        assert answer.status == 200
        return msgspec.json.decode(answer.body, type=Held)


def serve(donors: Sequence[Donor]) -> None:
    """All of them serve, and their sidecars are up: so none has a start of the others."""
    for donor in donors:
        donor.start_serving()
    for donor in donors:
        with Asker(donor.port, donor=name_of(donor), key=key_of(donor)) as asker:
            asker.held()


def stage_and_serve(state: SharedState, donors: Sequence[Donor]) -> None:
    """All of them stage this version; their sidecars are up, and have heard of it."""
    stage_at(state, donors)
    serve(donors)
    for donor in donors:
        with Asker(donor.port, donor=name_of(donor), key=key_of(donor)) as asker:
            within(20.0, lambda asker=asker: asker.held().snapshots, "the sidecar heard of the folder")
