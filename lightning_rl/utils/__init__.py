"""Helpers without a domain: checks of arguments, files, names, seeds, devices, the Trainer."""
