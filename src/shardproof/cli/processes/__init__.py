"""The processes of a command: on one machine, on several, under Slurm and on Ray."""
