"""What a person sees of a run: the terminal view, the picture of the loss. Imports no engine."""
