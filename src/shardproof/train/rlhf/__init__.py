"""Preference and reinforcement training: TRL's trainers on our engine, rewards, and what answers may call."""
