"""Failure cases of data-parallel and sharded training, one small file each, run on our engine and on its peers."""
