"""Sharded tensors: whole to look at, a slice in memory, and what each operation on them means."""
