"""A trained model that generates answers: loading it, asking it, and scoring its answers."""
