"""Models that embed texts and files: losses, measures, the recipe, and a trained one that is asked."""
