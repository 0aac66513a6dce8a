"""Optimizers other than torch's."""
