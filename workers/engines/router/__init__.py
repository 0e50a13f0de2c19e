"""The router: one HTTP address in front of all engines of a fully async run."""
