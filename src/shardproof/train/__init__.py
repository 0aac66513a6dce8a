"""Recipes over transformers' Trainer: what to train, on what, and where the result goes."""
