"""`atoll vpn down`: leave the run's VPN."""

from __future__ import annotations

from atoll.cli.output import deliver
from atoll.cli.vpn.records import end_keeper, forget
from atoll.cli.vpn.up import InterfaceName
from atoll.config.environment import for_sidecar
from atoll.errors import ConfigError
from atoll.network.wireguard import Interface, check_able

END_S = 15.0


def down(*, interface: InterfaceName = "atoll0") -> int:
    """End this machine's `atoll vpn up`, and remove its interface: also one that a killed process left behind.

    An interface that Atoll did not make is never touched.

    Try:

        sudo atoll vpn down
        sudo atoll vpn down --interface atoll1

    Exit codes: 0 it is down; 2 there was none; 3 no root, or it does not end; 130/143 stopped.
    """
    check_able(interface)
    pid = end_keeper(interface, END_S)
    kept = Interface(interface, for_sidecar())
    left = kept.remove()
    forget(interface)
    if not pid and not left:
        other = "; the interface of that name is not Atoll's" if kept.owner() == "" else ""
        raise ConfigError(f"no atoll vpn is up on {interface}{other}; name another with --interface")
    ended = f"atoll vpn up (pid {pid}) has ended" if pid else "no process kept it any more"
    deliver(f"{interface} is down: {ended}\n")
    return 0
