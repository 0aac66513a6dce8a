"""Rows as a run distributes them: their lengths, which rank reads which, and what is packed together."""
