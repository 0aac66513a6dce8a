"""How models process audio, video frames and spoken answers."""
