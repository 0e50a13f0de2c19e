"""Sources: model folders and prepared prompts from what a run file names."""
