"""Supervised fine-tuning: the recipe, its losses, and the cheaper ways to them."""
