"""PEFT adapters: where they go, how they are initialised, and training that starts from existing ones."""
