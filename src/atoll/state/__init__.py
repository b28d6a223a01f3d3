"""Names and tensors, flat buffers in global coordinates, digests."""
