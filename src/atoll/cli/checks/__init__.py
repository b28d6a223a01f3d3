"""What `atoll doctor` looks at, and how it says it; what concerns the network alone is in `network.checks`."""
