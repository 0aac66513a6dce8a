"""How well a text answers a query: losses, metrics, the recipe, and inference with a trained model."""
