"""The harness tells what became of every rank."""

import itertools
import os
import time
from functools import partial

from tests.harness import succeeded
from tests.megatron_cases import CASES

PP2 = CASES["pp2"]


def say(rank: int, word: str) -> None:
    print(word, rank, os.environ["WORD"], flush=True)


def double(rank: int) -> int:
    return 2 * rank


def die_in_the_second_iteration(rank: int) -> None:
    import megatron.training.training as training

    train_step = training.train_step
    calls = itertools.count(1)

    def fatal_train_step(*args, **kwargs):
        if next(calls) == 2 and rank == 1:
            os._exit(9)
        return train_step(*args, **kwargs)

    training.train_step = fatal_train_step


def stop(rank: int) -> None:
    raise SystemExit(76)


def hang(rank: int) -> None:
    time.sleep(1000)


def test_hooks_run_in_every_rank(megatron) -> None:
    ranks = succeeded(
        megatron(PP2.argv(), 2, before=partial(say, word="hello"), after=double, env={"WORD": "!"})
    )
    assert [r.value for r in ranks] == [0, 2]
    assert "hello 1 !" in ranks[1].output
    assert "hello 1 !" not in ranks[0].output
    assert ranks[0].weights != ranks[1].weights
    assert [len(r.losses) for r in ranks] == [4, 4]
    assert ranks[0].losses[0] == {}


def test_a_killed_rank_ends_the_others(megatron) -> None:
    ranks = megatron(PP2.argv(), 2, before=die_in_the_second_iteration, timeout=60)
    assert ranks[1].exit_code == 9
    assert ranks[0].exit_code == 1
    assert not ranks[0].timed_out
    assert "Traceback" in ranks[0].output


def test_exit_codes_and_errors_come_back(megatron) -> None:
    (rank,) = megatron([], 1, before=stop)
    assert rank.exit_code == 76
    (rank,) = megatron(["--no-such-flag"], 1)
    assert rank.exit_code == 2
    assert "--no-such-flag" in rank.output


def test_a_hanging_rank_is_killed(megatron) -> None:
    (rank,) = megatron([], 1, before=hang, timeout=2)
    assert rank.timed_out
    assert rank.exit_code == -9
