"""The forms a record may have, and the single form that all are normalised to."""
