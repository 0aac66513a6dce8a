"""Checkpoints that survive: written aside, verified, renamed; loaded at any stage and on any number of ranks."""
