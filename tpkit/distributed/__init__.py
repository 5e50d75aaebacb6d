"""Ranks: starting them, joining them, and the collectives of a layer."""
