"""Configurations of TRL as recipes: a table of its options, and a writer that reads them."""
