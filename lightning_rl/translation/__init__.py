"""Configurations of other trainers as recipes: what each of their options becomes, and why some are refused."""
