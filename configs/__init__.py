"""What is asked for: the run file's schema, one module a section, and its loading."""
