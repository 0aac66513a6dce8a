"""Model families: one record each, and the parts of a model by its record or by the names of its modules."""
