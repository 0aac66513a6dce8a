"""What is refused before a run starts, by its options and by the folder that it would go on from."""
