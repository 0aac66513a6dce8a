"""From rows to token ids, labels and batches."""
