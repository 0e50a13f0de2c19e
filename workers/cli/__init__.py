"""The command line: one module a group of verbs. Nothing here imports torch or Ray."""
