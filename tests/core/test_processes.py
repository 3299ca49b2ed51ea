import signal

from tp_invariant.core.processes import how_it_ended


def test_how_a_process_ended():
    assert how_it_ended(-signal.SIGILL) == "ended by SIGILL"
    assert how_it_ended(-200) == "ended by signal 200"
    assert how_it_ended(3) == "ended with status 3"
