"""Attention and recurrences over rows that are packed, without padding, or in parts."""
