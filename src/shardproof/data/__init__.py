"""Rows for training: read, check, normalise, tokenise. Imports neither torch nor the engine at the top."""
