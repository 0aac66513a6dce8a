"""Classification and regression: labels, metrics, the recipe, and inference with a trained model."""
