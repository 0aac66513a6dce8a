"""The model of a run: which it is, how it is loaded, and what is changed in it before it trains."""
