"""What observes a training run, and what is recorded about it."""
