"""Cutting what is computed, beside the engine that cuts what is held."""
