"""Checkpoints that survive: written aside, checked, renamed; loaded at any stage and number of ranks."""
