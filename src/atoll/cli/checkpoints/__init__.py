"""`atoll checkpoints`: looking at what runs saved, and taking models out and in."""
