"""What is done: one file an activity, and the logic that they share."""
