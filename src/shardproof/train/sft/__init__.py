"""Supervised fine-tuning: the recipe, its losses, and cheaper ways to compute them."""
