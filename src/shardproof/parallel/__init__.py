"""Sharding of computation, in addition to the engine, which shards state."""
