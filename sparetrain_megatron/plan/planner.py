"""From a profile to a plan: the three phases, and the cheapest of what they come to.

Pure: the same profile, budget and mode give the same plan. The phases only decide on what the one
before left open.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from sparetrain_megatron.errors import UsageError

from . import piggyback
from .blocks import Block
from .coarse import Coarse, Place, Shape, Singly
from .fine import Variant, can_defer, schedule, worth_deferring
from .plan import Method, Mode, Plan
from .profile import Operator, Profile, Run
from .segments import Candidate, candidates
from .timeline import Account, Timeline

SMALL = 20_000
"""Up to so many operators all smaller budgets are tried, beyond it only a few."""

RUNGS = 2
"""How often a large step's budget is halved in search of a cheaper plan."""


def default_budget(profile: Profile) -> int:
    """What deferral may hold where nothing is said: the device's headroom, in bytes.

    Raises:
        UsageError: The profile doesn't know the device's memory.
    """
    memory = profile.memory
    if not memory.capacity:
        raise UsageError("the profile doesn't say how much memory there is: give a memory budget")
    return max(0, memory.capacity - min(memory.in_use, default=memory.peak))


def plan(
    profile: Profile, budget: int | None = None, mode: Mode = "full", window_use: float = 0.9
) -> Plan:
    """Decides for every operator of a step how, where and why it is checked.

    Args:
        profile: One rank's step.
        budget: Bytes that deferral may hold; None: `default_budget`. The device's capacity, where
            the profile has it, is kept to as well.
        mode: Which phases may be used: naive none, piggyback the first, coarse two, full all.
        window_use: Share of each window that is planned for, above 0 to 1.

    Raises:
        UsageError: A wrong budget, mode or share, or an inconsistent profile.
    """
    if mode not in ("naive", "piggyback", "coarse", "full"):
        raise UsageError(f"mode {mode!r}: should be naive, piggyback, coarse or full")
    if not 0 < window_use <= 1:
        raise UsageError(f"window use {window_use}: should be above 0, at most 1")
    if budget is not None and budget < 0:
        raise UsageError(f"memory budget {budget}: should not be negative")
    if budget is None:
        budget = 0 if mode in ("naive", "piggyback") else default_budget(profile)
    from .build import build

    planner = Planner(profile, window_use, mode)
    return build(planner, planner.best(budget), budget)


@dataclasses.dataclass(slots=True)
class Draft:
    """One way to plan phases 2 and 3.

    Attributes:
        budget: What it was made for.
        segment_net: Seconds that segments take off the critical path.
        sparse_net: The same for fingerprints that they make needless.
        single_net: The same for operators deferred one by one.
        sparse: Steps whose fingerprints are of the output only.
        complete: Whether memory decided nothing.
    """

    budget: int
    places: list[Place]
    variants: list[Variant]
    at: list[Variant | None]
    used: dict[int, float]
    peak: int
    segment_net: float
    sparse_net: float
    single_net: float
    sparse: frozenset[int]
    complete: bool

    @property
    def net(self) -> float:
        return self.segment_net + self.sparse_net + self.single_net


class Planner:
    """What all drafts of one profile share."""

    def __init__(self, profile: Profile, window_use: float, mode: Mode) -> None:
        self.profile = profile
        self.mode = mode
        self.window_use = window_use
        self.timeline = Timeline(profile, window_use)
        self.assigned = [piggyback.assign(t, profile) for t in profile.templates]
        self.queueable = [
            tuple(
                ordinal
                for ordinal, operator in enumerate(template.operators)
                if assigned[ordinal] is None
                and can_defer(operator)
                and worth_deferring(operator, profile.costs)
            )
            for template, assigned in zip(profile.templates, self.assigned)
        ]
        self.blocks: dict[Shape, Block] = {}
        self.candidates: dict[Shape, list[Candidate]] = {}
        self.singly: dict[Shape, Singly] = {}
        if mode in ("coarse", "full"):
            for stretch in self.timeline.stretches:
                shape = stretch.templates
                if shape not in self.blocks:
                    block = self.blocks[shape] = Block(profile, shape, self.assigned)
                    self.candidates[shape] = candidates(block, profile.costs)
                    self._estimate_singly(shape, block)
        self._forwards = {
            (step.microbatch, step.layer): index
            for index, step in enumerate(profile.steps)
            if isinstance(step, Run) and profile.templates[step.template].phase == "forward"
        }
        self._fingerprints = [self._fingerprint_seconds(t) for t in range(len(profile.templates))]

    def _estimate_singly(self, shape: Shape, block: Block) -> None:
        net = check = 0.0
        held = covers = 0
        for region, template in zip(block.regions, shape):
            for ordinal in self.queueable[template]:
                operator = block.operators[region.start + ordinal]
                net += self.single_net(template, ordinal)
                check += operator.check_seconds
                held += operator.held
                covers |= 1 << region.start + ordinal
        if covers:
            self.singly[shape] = Singly(net, check, held, covers)

    def single_net(self, template: int, ordinal: int) -> float:
        """What deferring one operator takes off the critical path, in seconds."""
        operator, costs = self.profile.templates[template].operators[ordinal], self.profile.costs
        return operator.check_seconds - costs.record - costs.fingerprint * operator.written

    def _fingerprint_seconds(self, number: int) -> tuple[float, float]:
        """P-DMR's fingerprints of a region: of all operators, and of its output alone."""
        template, costs = self.profile.templates[number], self.profile.costs
        sizes = [
            operator.written
            for operator, assigned in zip(template.operators, self.assigned[number])
            if assigned and assigned[0] is Method.PDMR
        ]
        everything = costs.fingerprint * sum(sizes) + costs.observe * len(sizes)
        output = costs.fingerprint * sizes[-1] + costs.observe if sizes else 0.0
        return everything, output

    def fingerprint_seconds(self, template: int, sparse: bool) -> float:
        """P-DMR's fingerprints of a region."""
        return self._fingerprints[template][sparse]

    def replay_seconds(self, number: int) -> float:
        """What P-DMR adds to the recompute of a region."""
        early = self.profile.recompute_stops_early
        return sum(
            piggyback.extra_seconds(operator, early)
            for operator, assigned in self._operators(number)
            if assigned and assigned[0] is Method.PDMR
        )

    def unrecomputed_seconds(self, number: int) -> float:
        """Time of the checks of a region's operators that P-DMR doesn't cover."""
        return sum(
            operator.check_seconds
            for operator, assigned in self._operators(number)
            if not assigned or assigned[0] is not Method.PDMR
        )

    def _operators(self, number: int) -> Iterator[tuple[Operator, piggyback.Assigned]]:
        return zip(self.profile.templates[number].operators, self.assigned[number])

    # --- drafts ------------------------------------------------------------------------------

    def best(self, budget: int) -> Draft:
        """The cheapest draft within the budget."""
        best = self._nothing()
        if self.mode not in ("coarse", "full") or budget == 0 or not self._policies():
            return best
        small = self.profile.operator_count() <= SMALL
        policies = self._policies()
        for rung, smaller in enumerate(self._budgets(budget)):
            drafts = [(policy, self._draft(smaller, *policy)) for policy in policies]
            policy, cheapest = max(drafts, key=lambda item: item[1].net)
            # A saving that is not there but for the rounding of sums is no reason to hold more.
            if cheapest.net > best.net * (1 + 1e-9):
                best = cheapest
            if not small:
                if rung == RUNGS or all(draft.complete for _, draft in drafts):
                    break
                policies = [policy]
        return best

    def _budgets(self, budget: int) -> Iterator[int]:
        sizes = [c.segment.boundary for some in self.candidates.values() for c in some]
        if self.mode == "full":
            sizes += [
                template.operators[ordinal].held
                for template, ordinals in zip(self.profile.templates, self.queueable)
                for ordinal in ordinals
            ]
        least = max(1, min(sizes, default=budget + 1))
        yield budget
        while (budget := budget // 2) >= least:
            yield budget

    def _policies(self) -> list[tuple[bool, bool]]:
        """Whether segments are used, and whether they leave room for single deferral."""
        some = any(self.candidates.values())
        if self.mode == "coarse":
            return [(True, False)] if some else []
        return [(True, True), (True, False), (False, False)] if some else [(False, False)]

    def _nothing(self) -> Draft:
        places = [Place(stretch) for stretch in self.timeline.stretches]
        at: list[Variant | None] = [None] * len(self.profile.steps)
        return Draft(0, places, [], at, {}, 0, 0.0, 0.0, 0.0, frozenset(), True)

    def _draft(self, budget: int, segments: bool, singly: bool) -> Draft:
        timeline, profile = self.timeline, self.profile
        account = Account(profile, budget)
        room = [slot.capacity for slot in timeline.slots]
        places = Coarse(
            timeline,
            account,
            room,
            self.candidates if segments else {},
            self.singly if singly else {},
        ).run()
        segment_net = sum(c.net for place in places for c, _ in place.segments)
        sparse = self._sparse(places)
        sparse_net = 0.0
        for step in sparse:
            everything, output = self._fingerprints[self._template(step)]
            sparse_net += everything - output
        peak = account.peak
        variants: list[Variant] = []
        at: list[Variant | None] = [None] * len(profile.steps)
        single_net = 0.0
        if self.mode == "full":
            variants, at = self._variants(places, budget)
            peak = max(peak, schedule(timeline, account, room, variants, at))
            for variant in variants:
                numbers = (variant.outcome >= 0).sum(axis=0).tolist()
                for ordinal, number in zip(variant.ordinals, numbers):
                    single_net += number * self.single_net(variant.template_number, ordinal)
                steps = int((variant.outcome >= 0).any(axis=1).sum())
                single_net -= steps * variant.others * profile.costs.record
        used = {
            slot.ordinal: slot.capacity - left
            for slot, left in zip(timeline.slots, room)
            if slot.capacity > left
        }
        return Draft(
            budget,
            places,
            variants,
            at,
            used,
            peak,
            segment_net,
            sparse_net,
            single_net,
            sparse,
            not account.bound,
        )

    def _template(self, step: int) -> int:
        run = self.profile.steps[step]
        assert isinstance(run, Run)
        return run.template

    def _sparse(self, places: Sequence[Place]) -> frozenset[int]:
        """Recomputes that a segment replays as a whole, and their forwards.

        The replay then checks every value of the recompute that training uses, so that the two
        passes need to agree on the output alone.
        """
        found: list[int] = []
        for place in places:
            if not place.segments:
                continue
            block = self.blocks[place.stretch.templates]
            replays = 0
            for candidate, _ in place.segments:
                replays |= candidate.replays
            for index, phase in enumerate(block.phases):
                compared = block.compared(index)
                if phase == "recompute" and all(replays >> number & 1 for number in compared):
                    step = place.stretch.first + index
                    found.append(step)
                    run = self.profile.steps[step]
                    assert isinstance(run, Run)
                    forward = self._forwards.get((run.microbatch, run.layer))
                    if forward is not None:
                        found.append(forward)
        return frozenset(found)

    def _alone(
        self, place: Place, number: int, covered: int, ordinals: Sequence[int]
    ) -> tuple[list[int], int]:
        """Which of a region's operators to defer one by one, and how many are recorded with them.

        Outside of checkpointed blocks a region is recorded as a whole or not at all.
        """
        phases = {self.profile.templates[t].phase for t in place.stretch.templates}
        if covered or "recompute" in phases:
            return list(ordinals), 0
        others = len(self.profile.templates[number].operators) - len(ordinals)
        gain = sum(self.single_net(number, ordinal) for ordinal in ordinals)
        worth = gain > others * self.profile.costs.record
        return (list(ordinals), others) if worth else ([], 0)

    def _variants(
        self, places: Sequence[Place], budget: int
    ) -> tuple[list[Variant], list[Variant | None]]:
        """Groups the regions by the operators that phase 2 has left."""
        known: dict[tuple[int, tuple[int, ...], int], Variant] = {}
        at: list[Variant | None] = [None] * len(self.profile.steps)
        for place in places:
            start = 0
            for index, number in enumerate(place.stretch.templates):
                template = self.profile.templates[number]
                covered = place.covered >> start & (1 << len(template.operators)) - 1
                start += len(template.operators)
                left = [
                    ordinal
                    for ordinal in self.queueable[number]
                    if not covered >> ordinal & 1 and template.operators[ordinal].held <= budget
                ]
                left, others = self._alone(place, number, covered, left)
                key = (number, tuple(left), others)
                variant = known.get(key)
                if variant is None:
                    variant = known[key] = Variant(number, template, left, others)
                step = place.stretch.first + index
                if variant.ordinals:
                    at[step] = variant
                    variant.steps.append(step)
        return [variant for variant in known.values() if variant.ordinals], at
