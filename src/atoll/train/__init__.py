"""The built-in trainer: a Llama, its inner step, and the one loop that drives a peer."""
