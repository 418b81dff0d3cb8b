"""That the service is to end, and what its end waits for."""

import threading


class Leaving(threading.Event):
    """Set once the service is to end: nobody may wait any more for those who follow a job."""

    waits_for = "answers that are being given"
    """What is being ended, for whoever has to say why that takes so long."""
