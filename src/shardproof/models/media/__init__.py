"""What models make of sounds, frames of videos and spoken answers."""
