"""The model of a run: which one, how it is loaded, and what is changed in it before training."""
