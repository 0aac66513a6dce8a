"""Known errors from public threads, by subject."""
