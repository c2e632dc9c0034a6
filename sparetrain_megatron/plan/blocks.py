"""A block's data flow: consecutive regions of one microbatch and layer, as one list."""

from __future__ import annotations

from collections.abc import Sequence

from sparetrain_megatron.errors import UsageError

from .piggyback import Assigned
from .plan import Method, Part
from .profile import Operator, Profile, Template


class Block:
    """The regions that a segment may reach over, typically a layer's recompute and backward.

    Values are numbered over the whole block: operators first, in order, then what comes from
    outside.

    Attributes:
        templates: The regions' templates, in order.
        operators: All operators, in order.
        regions: For each region the range of its operators.
        inputs: For each operator the values that it reads.
        overwrites: For each operator the values that it writes in place.
        sizes: Bytes of each value.
        assigned: What phase 1 decided for each operator.
        visits: For each region, how many of its phase come before it.
    """

    def __init__(
        self,
        profile: Profile,
        templates: Sequence[int],
        assigned: Sequence[Sequence[Assigned]],
    ) -> None:
        self.templates = tuple(templates)
        self.operators: list[Operator] = []
        self.regions: list[range] = []
        self.visits: list[int] = []
        self.inputs: list[tuple[int, ...]] = []
        self.overwrites: list[tuple[int, ...]] = []
        self.assigned: list[Assigned] = []
        count = sum(len(profile.templates[t].operators) for t in templates)
        outside: list[int] = []
        numbers: dict[str | None, tuple[list[int], list[int]]] = {}
        seen: dict[str, int] = {}
        for number in templates:
            template = profile.templates[number]
            shift = len(self.operators)
            external = []
            for value in template.externals:
                if value.phase in numbers and value.value is not None:
                    external.append(_look_up(numbers[value.phase], value.value, template))
                else:
                    external.append(count + len(outside))
                    outside.append(value.bytes)

            def resolve(
                values: tuple[int, ...], shift: int = shift, external: list[int] = external
            ) -> tuple[int, ...]:
                return tuple(shift + v if v >= 0 else external[~v] for v in values)

            for operator in template.operators:
                self.operators.append(operator)
                self.inputs.append(resolve(operator.inputs))
                self.overwrites.append(resolve(operator.overwrites))
            self.regions.append(range(shift, len(self.operators)))
            self.visits.append(seen.get(template.phase, 0))
            seen[template.phase] = self.visits[-1] + 1
            numbers[template.phase] = (list(self.regions[-1]), external)
            self.assigned.extend(assigned[number])
        self.phases = [profile.templates[t].phase for t in templates]
        self.sizes = [o.written for o in self.operators] + outside

    @property
    def has_recompute(self) -> bool:
        return "recompute" in self.phases

    def compared(self, region: int) -> list[int]:
        """Operators of a region whose fingerprints P-DMR compares."""
        return [
            number
            for number in self.regions[region]
            if (assigned := self.assigned[number]) and assigned[0] is Method.PDMR
        ]

    def parts(self, members: Sequence[int]) -> tuple[Part, ...]:
        """The given operators (ascending numbers) as ranges of ordinals within regions."""
        found: list[Part] = []
        for region, phase, visit in zip(self.regions, self.phases, self.visits):
            for number in members:
                if number not in region:
                    continue
                ordinal = number - region.start
                last = found[-1] if found else None
                if last and (last.phase, last.visit, last.stop) == (phase, visit, ordinal):
                    found[-1] = last._replace(stop=ordinal + 1)
                else:
                    found.append(Part(phase, ordinal, ordinal + 1, visit))
        return tuple(found)

    def transient(self, members: Sequence[int]) -> int:
        """Largest amount that a replay of these operators has alive at once, without boundary."""
        inside = set(members)
        last_use = {number: number for number in members}
        for number in members:
            for value in self.inputs[number]:
                if value in inside:
                    last_use[value] = number
        ends: dict[int, int] = {}
        for value, number in last_use.items():
            ends[number] = ends.get(number, 0) + self.sizes[value]
        alive = largest = 0
        for number in members:
            alive += self.sizes[number]
            largest = max(largest, alive)
            alive -= ends.get(number, 0)
        return largest


def _look_up(known: tuple[list[int], list[int]], value: int, template: Template) -> int:
    """The number of another region's value."""
    produced, external = known
    try:
        return produced[value] if value >= 0 else external[~value]
    except IndexError:
        raise UsageError(
            f"the profile's {template.phase} region {template.name} reads value {value} of a "
            "region before it, which has no such value"
        ) from None
