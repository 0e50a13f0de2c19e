"""Trainers: one collection in, one optimizer update out."""
