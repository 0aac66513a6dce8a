"""A finished model in fewer bits: `kinds` has what there is, `places` which weights are packed, `rows` what it is
calibrated and measured with, `calibrated` how weights are rounded by what a model computes of rows, and `files` how a
folder is written."""
