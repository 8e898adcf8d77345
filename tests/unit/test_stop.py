"""StopSignal: the first signal only raises a flag, the second stops at once, and the old handlers come back."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest

from moerl.stop import ASYNCIO, StopSignal

SIGNALS = [signal.SIGINT, signal.SIGTERM]


def current():
    return [signal.getsignal(number) for number in SIGNALS]


def test_without_a_signal_nothing_is_requested_and_the_handlers_come_back():
    before = current()
    with StopSignal() as stop:
        assert current() != before
        assert not stop.requested
    assert current() == before


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_a_flag_and_a_message(number, caplog):
    with StopSignal() as stop:
        signal.raise_signal(number)
        assert stop.requested
    assert f"{number.name}: stopping after this step; once more stops at once" in caplog.text


def raise_twice(first, second, reached):
    with StopSignal():
        signal.raise_signal(first)
        reached.append("between")
        signal.raise_signal(second)
        reached.append("after")


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_the_second_signal_stops_at_once_and_the_handlers_come_back(first, second):
    before, reached = current(), []
    with pytest.raises(KeyboardInterrupt):
        raise_twice(first, second, reached)
    assert reached == ["between"]
    assert current() == before


def test_an_error_inside_passes_through_and_the_handlers_come_back():
    before = current()
    with pytest.raises(ZeroDivisionError), StopSignal():
        _ = 1 // 0
    assert current() == before


def test_each_use_starts_without_a_request():
    with StopSignal():
        signal.raise_signal(signal.SIGINT)
    with StopSignal() as again:
        assert not again.requested


def test_a_process_that_is_told_to_end_finishes_what_it_does():
    code = """
import sys
from moerl.stop import StopSignal
with StopSignal() as stop:
    steps = 0
    while not stop.requested:
        steps += 1
        if steps == 1:
            print("ready", flush=True)
print("saved" if steps else "not started", flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert (out, process.returncode) == ("saved\n", 0)


def test_the_second_signal_silences_the_tasks_that_it_cuts_off_and_only_them():
    seen = []

    def stop_twice():
        with StopSignal():
            signal.raise_signal(signal.SIGINT)
            seen.append(ASYNCIO.disabled)
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                seen.append(ASYNCIO.disabled)

    with pytest.raises(KeyboardInterrupt):
        stop_twice()
    assert seen == [False, True]
    assert not ASYNCIO.disabled


async def never(cleaned):
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        cleaned.append("task")


async def many_that_never_end(cleaned):
    async with asyncio.TaskGroup() as group:
        for _ in range(50):
            group.create_task(never(cleaned))
        group.create_task(stops_twice())


async def stops_twice():
    await asyncio.sleep(0)
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


def test_on_an_event_loop_the_second_signal_cancels_every_task_and_the_loop_closes():
    before, cleaned = current(), []
    with pytest.raises(KeyboardInterrupt), StopSignal(), asyncio.Runner() as runner:
        runner.run(many_that_never_end(cleaned))
    assert cleaned == ["task"] * 50
    assert current() == before


def test_a_loop_that_ends_before_it_is_cut_off_ends_well():
    with StopSignal() as stop, asyncio.Runner() as runner:
        runner.run(stops_twice())
        assert runner.run(asyncio.sleep(0, "ended")) == "ended"
        assert stop.requested


HAMMERED = """
import asyncio, os, signal, threading, time
from moerl.stop import StopSignal

async def player(times):
    for _ in range(times):
        await asyncio.sleep(0)

async def play():
    async with asyncio.TaskGroup() as group:
        for _ in range(300):
            group.create_task(player(10**9))

def press():
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)

for _ in range(10):
    threading.Thread(target=press).start()
    try:
        with StopSignal(), asyncio.Runner() as runner:
            runner.run(play())
    except KeyboardInterrupt:
        print("stopped", flush=True)
"""


def test_a_busy_loop_is_cut_off_every_time():
    done = subprocess.run([sys.executable, "-c", HAMMERED], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["stopped"] * 10, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
