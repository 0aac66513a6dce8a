"""Models that embed texts and files: losses, metrics, the recipe, and inference with a trained model."""
