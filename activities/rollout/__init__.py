"""Rollouts: prompts in, scored groups out, no prompt lost."""
