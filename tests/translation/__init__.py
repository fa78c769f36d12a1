"""What is compared with TRL itself, which lies in an environment of its own."""
