"""The process that brings what was staged to a disk, and from there to an object store."""
