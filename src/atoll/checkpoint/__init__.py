"""Saving while training goes on, and going on from what was saved."""
