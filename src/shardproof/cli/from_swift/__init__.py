"""Commands of ms-swift: what their options are called here, and what there is none of."""
