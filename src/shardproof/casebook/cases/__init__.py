"""One file per case. Each defines `CASE`."""
