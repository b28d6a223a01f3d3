"""A peer's own devices and, around them, the elastic set of peers."""
