"""What moves between ranks, and how: the floor that the engine stands on. It knows tensors and process groups, and no
parameter, unit or stage."""
