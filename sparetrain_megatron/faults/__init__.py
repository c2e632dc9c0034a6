"""Faults: what to inject, injecting it, and campaigns of many."""
