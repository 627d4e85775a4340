"""Clients that tell what a rollout costs those who use the fleet."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

_BETWEEN_S = 0.1  # a client's two requests: the controller needs some of the processor too


@dataclass(frozen=True)
class Served:
    """One request to one replica, not through the balancer."""

    replica: int
    began_s: float
    ended_s: float
    ok: bool


class Watchers:
    """Clients of the fleet, by the OpenAI library with its own retries, and one steady client of every replica."""

    def __init__(self, url: str, ports: Sequence[int], clients: int):
        self.num_requests, self.lost = 0, []
        self.served: list[Served] = []
        self._stop, self._lock = threading.Event(), threading.Lock()
        work = [(self._fleet_client, url)] * clients + [(self._replica_client, i) for i in enumerate(ports)]
        self._threads = [threading.Thread(target=one, args=(given,), daemon=True) for one, given in work]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Return when the last answers have come."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def min_serving(self) -> int:
        """The fewest replicas that answered what they were asked at one moment."""
        by_replica: dict[int, list[Served]] = {}
        for one in self.served:
            by_replica.setdefault(one.replica, []).append(one)
        first = max(min(one.began_s for one in all_) for all_ in by_replica.values())
        last = min(max(one.ended_s for one in all_) for all_ in by_replica.values())
        moments = [one.began_s for one in self.served if first <= one.began_s <= last and not one.ok]
        counts = [sum(_answers(all_, moment) for all_ in by_replica.values()) for moment in moments]
        return min(counts, default=len(by_replica))

    def _fleet_client(self, url: str) -> None:
        import openai

        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=30)
        while not self._stop.wait(_BETWEEN_S):
            try:
                client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "Where is it?"}])
                error = None
            except openai.OpenAIError as raised:
                error = f"{type(raised).__name__}: {raised}"
            with self._lock:
                self.num_requests += 1
                self.lost += [error] if error else []

    def _replica_client(self, replica: tuple[int, int]) -> None:
        import openai

        number, port = replica
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=30, max_retries=0)
        while not self._stop.wait(_BETWEEN_S):
            began, ok = time.monotonic(), True
            try:
                client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "Are you there?"}])
            except openai.OpenAIError:
                ok = False
            self.served.append(Served(number, began, time.monotonic(), ok))


def _answers(all_: Sequence[Served], moment: float) -> bool:
    """Whether what a replica was asked last before a moment was answered."""
    last = max((one for one in all_ if one.began_s <= moment), key=lambda one: one.began_s)
    return last.ok
