"""The options of a run, what they mean to each other, and in the words of transformers."""
