"""Phase 1: operators that are recomputed anyway are checked by their recompute (P-DMR)."""

from __future__ import annotations

from .plan import Method, Why
from .profile import Operator, Profile, Template

Assigned = tuple[Method, Why] | None
"""An operator's method and the reason; None: left to the next phases."""


def replays_too_much(operator: Operator, stops_early: bool) -> bool:
    """Whether P-DMR would replay more communication than it is worth (B_c > 2A).

    Only where the recompute stops early is anything replayed for P-DMR at all.
    """
    return stops_early and operator.replay is not None and operator.replay > 2 * operator.seconds


def extra_seconds(operator: Operator, stops_early: bool) -> float:
    """What P-DMR of an operator adds to the recompute: nothing, unless it stops before it."""
    return operator.seconds + operator.replay if stops_early and operator.replay is not None else 0


def assign(template: Template, profile: Profile) -> list[Assigned]:
    """The operators of one kind of region that phase 1 decides on, by ordinal."""
    return [_assign(operator, profile.recompute_stops_early) for operator in template.operators]


def _assign(operator: Operator, stops_early: bool) -> Assigned:
    if operator.collective:
        return Method.NAIVE, Why.COLLECTIVE
    if operator.integer:
        return Method.NAIVE, Why.INTEGER
    if not operator.recomputed:
        return None
    if replays_too_much(operator, stops_early):
        return Method.NAIVE, Why.REPLAY
    return Method.PDMR, Why.RECOMPUTED
