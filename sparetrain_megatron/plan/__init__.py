"""Profiles of a training step and plans of its checks: data, and pure functions between them."""

from .plan import (
    Assignment,
    Method,
    Mode,
    Plan,
    RegionChoice,
    Segment,
    WindowUse,
    load_plans,
    save_plans,
)
from .planner import default_budget, plan
from .profile import (
    Costs,
    External,
    Identity,
    InnerWindow,
    Memory,
    Operator,
    Profile,
    Run,
    Template,
    Window,
)

__all__ = [
    "Assignment",
    "Costs",
    "External",
    "Identity",
    "InnerWindow",
    "Memory",
    "Method",
    "Mode",
    "Operator",
    "Plan",
    "Profile",
    "RegionChoice",
    "Run",
    "Segment",
    "Template",
    "Window",
    "WindowUse",
    "default_budget",
    "load_plans",
    "plan",
    "save_plans",
]
