"""Fills a profile from running iterations."""

from .recorder import Recorder

__all__ = ["Recorder"]
