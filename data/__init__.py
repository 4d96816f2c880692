"""Clips and captions on disk to batches of cached tensors. Knows no model and no trainer."""
