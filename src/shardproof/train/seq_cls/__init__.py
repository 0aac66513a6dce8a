"""Classifiers and regressions: labels, measures, the recipe, and a trained one that is asked."""
