"""The engine: parameters that are whole to your code and a shard in memory."""
