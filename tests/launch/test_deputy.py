"""The deputy of a supervisor: it tells the end of a job from the loss of its first node."""

import socket
import threading

from pipeline.launch import deputy


def test_a_supervisor_that_ends_is_not_lost(tmp_path):
    watched = deputy.Deputy("1", tmp_path)
    found = []
    listening = threading.Thread(target=lambda: found.append(deputy.listen("127.0.0.1", watched.port)))
    listening.start()
    while not watched.has_connection():
        pass
    watched.close()
    listening.join()
    assert found == [True]


def test_a_supervisor_that_is_silent_is_lost():
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and says nothing
        port = server.getsockname()[1]
        assert not deputy.listen("127.0.0.1", port, silence=0.3)
    assert not deputy.listen("127.0.0.1", port, silence=0.3)
