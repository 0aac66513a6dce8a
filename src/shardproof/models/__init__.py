"""Models that shardproof can make by itself, and what it needs to know about model families."""
