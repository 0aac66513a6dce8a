"""The memory and traffic of a rank, found by running the real engine on the meta device."""
