"""A trained model that writes: loaded, asked, and judged by what it wrote."""
