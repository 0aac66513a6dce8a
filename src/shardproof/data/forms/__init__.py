"""What a record may look like, and the one form that all of them become."""
