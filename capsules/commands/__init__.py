"""The commands of `capsules`, one file each. Nothing heavy is imported before a command runs."""
