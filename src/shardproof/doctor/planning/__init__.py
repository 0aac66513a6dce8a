"""What a rank holds and moves, found by running the real engine on the meta device."""
