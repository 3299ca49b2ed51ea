"""`parallelize`: which module is replaced by what, and whether a plan is right."""
