"""Communication between ranks, the lowest layer of the engine. It knows tensors and process groups, but no parameters,
units or stages."""
