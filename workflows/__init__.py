"""In what order: deterministic Temporal workflows and their pure decisions."""
