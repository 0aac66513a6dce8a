"""Checks before a run starts, of its options and of the folder that it would continue from."""
