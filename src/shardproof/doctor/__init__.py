"""Before GPU hours are spent: what fits, what is wrong, whether numbers agree, what an error means."""
