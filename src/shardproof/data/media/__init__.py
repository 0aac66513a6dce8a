"""Images, audio and video of rows: reading, encoding and batching."""
