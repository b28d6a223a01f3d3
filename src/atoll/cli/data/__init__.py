"""`atoll data`: preparing text, and looking at what was prepared."""
