"""Translation of TRL configurations to recipes: a table of TRL's options, and a writer of recipes."""
