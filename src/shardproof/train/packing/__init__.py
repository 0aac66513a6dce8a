"""A finished model in fewer bits: `kinds` has the formats, `places` chooses the weights to pack, `rows` reads rows for
calibration and measurement, `calibrated` rounds weights by what a model computes from rows, and `files` writes a
folder."""
