"""DiLoCo: schedule, outer state, the round transaction, and the optimizer that users hold."""
