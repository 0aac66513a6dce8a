"""The views of a run: terminal, report page, plot of the loss. Does not import the engine."""
