"""The digest of an op's vector, from its ranks: the same for every member, however it is cut.

Members that are cut differently hold the same routes. So each route has a digest, each rank gives those of its own, and
a peer puts them together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from atoll import kernels
from atoll.kernels import Bytes
from atoll.plan.routes import Routing


def route_digests(routing: Routing, codec: str, peer: str, rank: int, data: Bytes) -> dict[int, bytes]:
    """16 bytes for each route of this rank, by its number; `data` are the rank's wire bytes."""
    part = routing.part(peer, rank)
    digests, at = {}, 0
    for route, place in zip(part.routes.tolist(), routing.wire_slices(codec, part), strict=True):
        size = place.stop - place.start
        digests[route] = kernels.digest_bytes(data[at : at + size])
        at += size
    return digests


def combined_digest(routing: Routing, by_rank: Iterable[Mapping[int, bytes]]) -> str:
    """The digest of the whole vector, in hex, from the `route_digests` of all ranks of one peer; what the digest of an
    `Update`'s bytes is. ValueError if a route is missing."""
    digests: dict[int, bytes] = {}
    for each in by_rank:
        digests.update(each)
    missing = [route for route in range(len(routing.routes)) if route not in digests]
    if missing:
        raise ValueError(f"no rank gave the digests of routes {missing}")
    return kernels.result_digest([digests[route] for route in range(len(routing.routes))])
