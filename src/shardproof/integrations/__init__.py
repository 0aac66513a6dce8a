"""Our engine under the loops of others."""
