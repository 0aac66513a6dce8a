"""Where records come from: files, hubs, streams of them, and mixtures."""
