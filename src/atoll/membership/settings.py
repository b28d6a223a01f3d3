"""What the coordinator decides by: policy, quorum and timeouts, as one plain value."""

from __future__ import annotations

import msgspec


class Timeouts(msgspec.Struct, frozen=True):
    """Seconds, each bounding one kind of wait; the coordinator's values hold for all peers (see config.schema)."""

    heartbeat_s: float = 1.0
    dead_s: float = 5.0
    stall_s: float = 600.0
    ready_wait_s: float = 1800.0
    grace_s: float = 10.0
    freeze_s: float = 30.0
    attempt_s: float = 600.0
    vote_s: float = 60.0
    connect_s: float = 10.0
    quorum_wait_s: float = 600.0
    coordinator_lost_s: float = 120.0
    relearn_s: float = 30.0
    progress_timeout_s: float = 5.0


class CoordinatorSettings(msgspec.Struct, frozen=True):
    """The membership settings of one run. `max_seconds` 0 means no limit.

    `topology` "auto" and `connections` (between two members) 0 leave the choice to the planner. `lease_s` is for
    coordinators that share a journal in etcd. A checkpoint is due at every version that `save_rounds` divides, and with
    the first commit `save_s` seconds after the one before; 0: not for that reason.
    """

    run: str
    start_peers: int = 1
    min_peers: int = 1
    policy: str = "wait"
    max_attempts: int = 5
    norm_limit: float = 100.0
    max_seconds: float = 0.0
    topology: str = "auto"
    connections: int = 0
    timeouts: Timeouts = Timeouts()
    lease_s: float = 5.0
    save_rounds: int = 0
    save_s: float = 0.0
