"""One file a case. Each defines `CASE`."""
