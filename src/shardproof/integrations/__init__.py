"""Our engine under other libraries' training loops."""
