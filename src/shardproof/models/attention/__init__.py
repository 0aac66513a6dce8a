"""Attention and recurrences over rows that are packed, without padding, or split into parts."""
