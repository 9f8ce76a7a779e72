"""Signals wait for the end of a block, and their handlers are those of before."""

import os
import signal
import sys
import threading

import pytest

from memkit._recovery import signals
from memkit._recovery.signals import are_plain, deferred_signals
from memkit.recipes.stopping import StopSignal
from tests.forked import run_python_forked


@pytest.fixture(autouse=True)
def handlers():
    before = [(each, signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM)]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before:
        signal.signal(number, handler)


def test_a_signal_comes_after_the_block():
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_signals():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("block")
    assert done == ["block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_each_handler_is_called_once_for_each_signal():
    seen = []
    signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    with deferred_signals():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert seen == []
    assert seen == [signal.SIGTERM] * 2


@pytest.mark.parametrize("order", [(signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)])
def test_a_handler_that_raises_loses_no_other_signal(order):
    seen = []
    signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    with pytest.raises(KeyboardInterrupt), deferred_signals():
        for number in order:
            signal.raise_signal(number)
    assert seen == [signal.SIGTERM]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    with pytest.raises(SystemExit) as caught, deferred_signals():
        for number in order:
            signal.raise_signal(number)
    assert isinstance(caught.value.__context__, KeyboardInterrupt)


def test_a_handler_that_was_set_before_python_began_stays(monkeypatch):
    """Then Python has none to set again."""
    get = signals._get
    monkeypatch.setattr(signals, "_get", lambda number: None if number == signal.SIGINT else get(number))
    with deferred_signals():
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.skipif(os.name != "posix", reason="faulthandler.register is for POSIX")
def test_the_handler_of_faulthandler_stays():
    """It is set in C, and Python does not know of it; it waits as well."""
    code = """
        import faulthandler, os, signal, sys
        from memkit._recovery.signals import deferred_signals

        faulthandler.register(signal.SIGTERM)
        with deferred_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            print("block", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGTERM)
        """
    told = run_python_forked(code).stderr
    assert told.startswith("block")
    assert told.count("most recent call first") == 2


def test_an_error_in_the_block_passes_and_handlers_are_back():
    with pytest.raises(ValueError, match="mine"), deferred_signals():
        raise ValueError("mine")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sets_no_handlers_in_other_threads():
    found = []

    def run():
        with deferred_signals():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


@pytest.mark.parametrize(
    ("number", "handler", "is_plain"),
    [
        (signal.SIGINT, signal.default_int_handler, True),
        (signal.SIGINT, signal.SIG_IGN, True),  # a process in the background
        (signal.SIGINT, lambda *_: None, False),
        (signal.SIGTERM, signal.SIG_IGN, True),
        (signal.SIGTERM, lambda *_: None, False),
        (signal.SIGTERM, StopSignal()._note, True),  # a loop's, which only notes it
    ],
)
def test_recognizes_plain_handlers(number, handler, is_plain):
    signal.signal(number, handler)
    assert are_plain() is is_plain
