"""How well a text answers a query: losses, measures, the recipe, and a trained model that is asked."""
