"""The checks of `shardproof doctor`, one area per file."""
