"""Giving the shared state to peers that lack it, and taking it: staging, update log, sidecar, catching up."""
