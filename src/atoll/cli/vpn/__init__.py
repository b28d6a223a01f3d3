"""`atoll vpn`: a WireGuard network of the run's own peers."""
