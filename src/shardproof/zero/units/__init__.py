"""Units: what is gathered and reduced together, where it lies, and its gradients."""
