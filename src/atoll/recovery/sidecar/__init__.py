"""The sidecar: a small HTTP server, a process of its own, that gives what its trainer staged to peers of the run."""
