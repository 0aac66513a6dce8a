"""Pictures, sounds and videos of rows: read, encoded and put into batches."""
