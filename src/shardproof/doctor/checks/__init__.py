"""What `shardproof doctor` looks at, one kind of thing a file."""
