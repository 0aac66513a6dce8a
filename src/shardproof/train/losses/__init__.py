"""What a model is judged by: losses of tokens, cheaper ways to the same ones, and figures of each file."""
