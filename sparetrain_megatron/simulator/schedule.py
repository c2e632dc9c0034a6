"""Pipeline schedules, event by event: 1F1B and interleaved.

A schedule is data: for every stage a program of computations and of exchanges with its neighbours.
Running it gives when each begins and ends, and so every wait. Exchanges are as Megatron's: blocking
in plain 1F1B (what is sent and what is received together end together, and both sides must be
there), overlapped in the interleaved one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple


class Compute(NamedTuple):
    """One microbatch's forward or backward (with its recompute) of one chunk of layers."""

    kind: Literal["F", "B"]
    microbatch: int
    chunk: int = 0


class Message(NamedTuple):
    """What goes from one stage to a neighbour, after `Compute` (kind, microbatch, virtual)."""

    kind: Literal["F", "B"]
    microbatch: int
    virtual: int
    """Virtual stage that sends it."""


class Exchange(NamedTuple):
    """Messages that a stage sends and receives at one time."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


Item = Compute | Exchange
Program = list[Item]


class Span(NamedTuple):
    """What one item of a program came to; seconds.

    For an exchange, `wire` is the share of its time that the transfer itself takes; the rest is a
    bubble: waiting for a neighbour that isn't there yet.
    """

    start: float
    end: float
    wire: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.start


def programs(stages: int, microbatches: int, virtual: int = 1) -> list[Program]:
    """The schedule's programs, one a stage; microbatches and stages as in Megatron.

    Args:
        stages: Pipeline stages.
        microbatches: A step.
        virtual: Chunks a stage; above 1 the schedule is interleaved.
    """
    if virtual == 1:
        return [_plain(stage, stages, microbatches) for stage in range(stages)]
    return [_interleaved(stage, stages, microbatches, virtual) for stage in range(stages)]


def _plain(stage: int, stages: int, microbatches: int) -> Program:
    first, last = stage == 0, stage == stages - 1
    program: Program = []

    def exchange(
        send_forward: int = 0, receive_forward: int = 0, send_back: int = 0, receive_back: int = 0
    ) -> None:
        sends, receives = [], []
        if send_forward and not last:
            sends.append(Message("F", send_forward, stage))
        if send_back and not first:
            sends.append(Message("B", send_back, stage))
        if receive_forward and not first:
            receives.append(Message("F", receive_forward, stage - 1))
        if receive_back and not last:
            receives.append(Message("B", receive_back, stage + 1))
        if sends or receives:
            program.append(Exchange(tuple(sends), tuple(receives)))

    ahead = min(stages - stage - 1, microbatches)
    for m in range(1, ahead + 1):
        exchange(receive_forward=m)
        program.append(Compute("F", m))
        exchange(send_forward=m)
    steady = microbatches - ahead
    if steady:
        exchange(receive_forward=ahead + 1)
    for back in range(1, steady + 1):
        m = ahead + back
        program.append(Compute("F", m))
        exchange(send_forward=m, receive_back=back)
        program.append(Compute("B", back))
        exchange(send_back=back, receive_forward=m + 1 if back < steady else 0)
    for back in range(steady + 1, microbatches + 1):
        exchange(receive_back=back)
        program.append(Compute("B", back))
        exchange(send_back=back)
    return program


def _interleaved(stage: int, stages: int, microbatches: int, virtual: int) -> Program:
    total = microbatches * virtual

    def at(index: int, kind: Literal["F", "B"]) -> Compute:
        group, inside = divmod(index, stages * virtual)
        chunk, place = divmod(inside, stages)
        chunk = chunk if kind == "F" else virtual - 1 - chunk
        return Compute(kind, group * stages + place + 1, chunk)

    ahead = min((stages - stage - 1) * 2 + (virtual - 1) * stages, total)
    order = [at(i, "F") for i in range(ahead)]
    for i in range(total - ahead):
        order += [at(ahead + i, "F"), at(i, "B")]
    order += [at(i, "B") for i in range(total - ahead, total)]
    program: Program = []
    most = stages * virtual - 1
    for compute in order:
        piece = compute.chunk * stages + stage
        before = piece - 1 if compute.kind == "F" else piece + 1
        if 0 <= before <= most:
            message = Message(compute.kind, compute.microbatch, before)
            program.append(Exchange((), (message,)))
        program.append(compute)
        after = piece + 1 if compute.kind == "F" else piece - 1
        if 0 <= after <= most:
            message = Message(compute.kind, compute.microbatch, piece)
            program.append(Exchange((message,), ()))
    return program


def most_in_flight(program: Program, layers: Sequence[int]) -> int:
    """The most layers whose activations a stage keeps at one time.

    Args:
        layers: How many each of its chunks has.
    """
    now = most = 0
    for item in program:
        if isinstance(item, Compute):
            now += layers[item.chunk] * (1 if item.kind == "F" else -1)
            most = max(most, now)
    return most


def run(
    programs: Sequence[Program],
    seconds: Callable[[int, Compute], float],
    wire: float,
    work: Sequence[Sequence[float]] | None = None,
    blocking: bool = True,
) -> list[list[Span]]:
    """Runs a schedule.

    Args:
        programs: Of `programs`.
        seconds: Time of a stage's computation.
        wire: Time of one message.
        work: For each stage and item, seconds of checks that an exchange's wait is used for;
            what doesn't fit makes it longer.
        blocking: Whether a stage waits until what it sent has arrived.

    Returns:
        For each stage and item, when.

    Raises:
        RuntimeError: The schedule waits for itself.
    """
    spans: list[list[Span]] = [[] for _ in programs]
    clocks = [0.0] * len(programs)
    sent: dict[Message, float] = {}
    awaited: dict[Message, float] = {}
    posted = [False] * len(programs)
    left = sum(map(len, programs))
    while left:
        before = left
        for stage, program in enumerate(programs):
            mine = spans[stage]
            while len(mine) < len(program):
                item = program[len(mine)]
                now = clocks[stage]
                if isinstance(item, Compute):
                    end, busy = now + seconds(stage, item), 0.0
                else:
                    if not posted[stage]:
                        posted[stage] = True
                        sent.update(dict.fromkeys(item.sends, now))
                        awaited.update(dict.fromkeys(item.receives, now))
                    arrivals = [
                        _arrival(message, sent, awaited, wire, blocking)
                        for message in (*item.receives, *(item.sends if blocking else ()))
                    ]
                    if None in arrivals:
                        break
                    end = max([now, *(a for a in arrivals if a is not None)])
                    busy = min(wire, end - now)
                    if work is not None:
                        end = max(end, now + work[stage][len(mine)])
                    posted[stage] = False
                mine.append(Span(now, end, busy))
                clocks[stage] = end
                left -= 1
        if left == before:
            raise RuntimeError("the schedule waits for itself")
    return spans


def _arrival(
    message: Message,
    sent: dict[Message, float],
    awaited: dict[Message, float],
    wire: float,
    blocking: bool,
) -> float | None:
    """When a message is there; None: not known yet."""
    if message not in sent:
        return None
    if not blocking:
        return sent[message] + wire
    if message not in awaited:
        return None
    return max(sent[message], awaited[message]) + wire
