"""Losses over tokens, cheaper ways to compute them, and metrics by file."""
