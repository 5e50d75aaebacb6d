"""Checkpoints: what is stored (headers), who reads what (plan), and the reading."""
