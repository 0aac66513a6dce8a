"""Models that shardproof can build itself, and what it needs to know about model families."""
