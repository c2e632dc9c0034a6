"""Waiting for requests that cannot be polled."""

import threading

import pytest

from sparetrain_megatron.dmr.window import Waiter


class Request:
    """Completes when it is told to.

    Args:
        error: What its wait raises.
    """

    def __init__(self, error=None):
        self.error = error
        self.gate = threading.Event()
        self.waited = 0

    def wait(self):
        assert self.gate.wait(10)
        self.waited += 1
        if self.error is not None:
            raise self.error


def test_completion():
    waiter, requests = Waiter(), [Request(), Request()]
    done, finish = waiter.start(requests)
    requests[0].gate.set()
    assert not done.wait(0.05)
    requests[1].gate.set()
    assert done.wait(10)
    finish()
    assert [request.waited for request in requests] == [1, 1]


def test_finish_waits():
    waiter, request = Waiter(), Request()
    done, finish = waiter.start([request])
    timer = threading.Timer(0.05, request.gate.set)
    timer.start()
    finish()
    assert done.is_set()
    assert request.waited == 1


def test_one_after_the_other():
    waiter, first, second = Waiter(), Request(), Request()
    second.gate.set()
    done_first, _ = waiter.start([first])
    done_second, finish = waiter.start([second])
    assert not done_second.wait(0.05)
    first.gate.set()
    finish()
    assert done_first.is_set()


@pytest.mark.parametrize("error", [RuntimeError("connection closed by peer"), KeyboardInterrupt()])
def test_an_error_belongs_to_the_caller(error):
    """And the thread lives on."""
    waiter, broken, never = Waiter(), Request(error), Request()
    broken.gate.set()
    done, finish = waiter.start([broken, never])
    assert done.wait(10)
    with pytest.raises(type(error)):
        finish()
    assert never.waited == 0
    request = Request()
    request.gate.set()
    _, finish = waiter.start([request])
    finish()
    assert request.waited == 1


def test_nothing_to_wait_for():
    done, finish = Waiter().start([])
    finish()
    assert done.is_set()


def test_the_thread_ends_with_the_process():
    Waiter()
    threads = [t for t in threading.enumerate() if t.name == "sparetrain-waiter"]
    assert threads
    assert all(t.daemon for t in threads)
