"""Adapters of PEFT: where they go, how they begin, and those that training goes on with."""
