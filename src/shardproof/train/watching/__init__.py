"""What looks on while a run trains, and what is written of it."""
