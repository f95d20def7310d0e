"""Trains a drafter from nothing but the target's GGUF: data, features, training, evaluation (docs/training.md)."""
