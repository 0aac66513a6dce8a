"""Optimizers see slices: torch's step hooks, whole matrices for those that need them, and which of both one gets."""
