"""Tools for before a run: what fits, what is wrong, whether results agree, what an error means."""
