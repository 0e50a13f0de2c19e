"""Background evaluation: snapshots, receipts, sampling on an engine of its own."""
