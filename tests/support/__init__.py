"""What several tests share: swarms of real processes, the quadratic problem."""
