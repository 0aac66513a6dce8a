"""The options of a run, and what they mean together."""
