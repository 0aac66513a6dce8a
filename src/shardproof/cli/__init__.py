"""The `shardproof` command. Heavy libraries are imported inside the command that needs them."""
