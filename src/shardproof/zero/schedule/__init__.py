"""When: gathers, reductions and edits, what each stage keeps meanwhile, and where."""
