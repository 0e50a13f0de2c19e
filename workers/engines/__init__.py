"""Engines: sampling servers behind one HTTP contract."""
