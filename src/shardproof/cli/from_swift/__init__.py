"""Commands of ms-swift: what their options are called here, and which have no equivalent."""
