"""Drafts a description from config.json and the names of tensors. What is guessed is asked, never hidden."""

from tpkit.drafting.draft import Draft, draft

__all__ = ["Draft", "draft"]
