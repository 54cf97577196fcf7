"""Replicas with LRU caches, requests of shuffled chunks, and the routers that are compared."""

from __future__ import annotations

import bisect
import hashlib
import random
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from ragcachekit.cluster.router import Balancer, routing_stats

Request = dict[str, int]
"""Chunk ids in the order of the prompt, and their tokens."""


@dataclass(frozen=True)
class Setting:
    """What is simulated.

    A replica answers one request after the other, in ``missing tokens / speed + decode`` seconds. Requests
    arrive at random, so many that ``busy`` of all replicas' time would be used at a hit rate of a half.
    Filters are published every ``period`` seconds. ``cache`` is a replica's share of the corpus.
    """

    workload: str = "topics"
    replicas: int = 8
    requests: int = 20_000
    topics: int = 600
    per_topic: int = 12
    chunks: int = 6
    zipf: float = 1.0
    cache: float = 0.08
    speed: float = 4000.0
    decode: float = 0.1
    busy: float = 0.7
    period: float = 5.0
    seed: int = 0


WORKLOADS = {
    "topics": "6 of a topic's 12 chunks, and one of any topic; topics by Zipf",
    "questions": "always the same 6 chunks of a question; questions by Zipf",
    "independent": "6 chunks, each by Zipf of its own",
}


def zipf(count: int, exponent: float, draw: random.Random) -> Iterator[int]:
    """Numbers below ``count``, the k-th most frequent one ``k ** -exponent`` as often as the first."""
    sums = list(accumulate(rank**-exponent for rank in range(1, count + 1)))
    while True:
        yield min(bisect.bisect(sums, draw.random() * sums[-1]), count - 1)


def requests(setting: Setting) -> Iterator[Request]:
    """The requests of a workload, each with its chunks shuffled."""
    draw = random.Random(setting.seed)
    sizes = [draw.randint(100, 300) for _ in range(setting.topics * setting.per_topic)]
    places = list(range(len(sizes)))
    draw.shuffle(places)  # so that a chunk's popularity is not its topic's
    topics = zipf(setting.topics, setting.zipf, draw)
    single = zipf(len(sizes), setting.zipf, draw)
    for _ in range(setting.requests):
        if setting.workload == "independent":
            found = list(dict.fromkeys(places[next(single)] for _ in range(setting.chunks)))
        else:
            first = next(topics) * setting.per_topic
            of_topic = range(first, first + setting.per_topic)
            if setting.workload == "topics":
                found = [*draw.sample(of_topic, setting.chunks), draw.randrange(len(sizes))]
            else:
                found = list(of_topic[: setting.chunks])
        draw.shuffle(found)
        yield {f"chunk {one}": sizes[one] for one in found}


class Replica:
    """An LRU cache of ``budget`` tokens and a queue."""

    def __init__(self, budget: float) -> None:
        self._budget, self._used = budget, 0
        self.cache: OrderedDict[str, int] = OrderedDict()
        self.ends: deque[float] = deque()

    def queue(self, now: float) -> int:
        """Requests under way."""
        while self.ends and self.ends[0] <= now:
            self.ends.popleft()
        return len(self.ends)

    def serve(self, request: Request) -> int:
        """Take the chunks into the cache; returned are the tokens that were there."""
        hit = sum(tokens for one, tokens in request.items() if one in self.cache)
        for one, tokens in request.items():
            self._used += 0 if one in self.cache else tokens
            self.cache[one] = tokens
            self.cache.move_to_end(one)
        while self._used > self._budget:
            self._used -= self.cache.popitem(last=False)[1]
        return hit


class Router(Protocol):
    """Chooses a replica by number."""

    def choose(self, request: Request, queues: Sequence[int]) -> int:
        """The replica for a request; ``queues`` are the requests under way at each."""

    def publish(self, replicas: Sequence[Replica]) -> None:
        """Called once per period with the replicas as they are."""


class RoundRobin:
    """One after the other."""

    def __init__(self, setting: Setting) -> None:
        self._next, self._replicas = 0, setting.replicas

    def choose(self, request: Request, queues: Sequence[int]) -> int:
        self._next = (self._next + 1) % self._replicas
        return self._next

    def publish(self, replicas: Sequence[Replica]) -> None: ...


class PowerOfTwo(RoundRobin):
    """The shorter queue of two random replicas, Ray Serve's default."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._draw = random.Random(setting.seed)

    def choose(self, request: Request, queues: Sequence[int]) -> int:
        return min(self._draw.sample(range(self._replicas), 2), key=queues.__getitem__)


class FirstChunk(RoundRobin):
    """Consistent hashing by the first chunk; with equal weights, rendezvous hashing is the same."""

    def choose(self, request: Request, queues: Sequence[int]) -> int:
        first = next(iter(request))
        return max(range(self._replicas), key=lambda n: hashlib.sha256(f"{n} {first}".encode()).digest())


class PrefixAffinity(PowerOfTwo):
    """The idea of Ray's PrefixCacheAffinityRouter: who was sent the longest prefix; else the smallest tree.

    As by Ray's defaults, a prefix counts from a tenth of the prompt on, queues are not looked at but among
    replicas of equal prefixes, and nothing is evicted from the trees.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._trees: list[set[tuple[str, ...]]] = [set() for _ in range(setting.replicas)]

    def choose(self, request: Request, queues: Sequence[int]) -> int:
        ids = tuple(request)
        matched = [next((n for n in range(len(ids), 0, -1) if ids[:n] in tree), 0) for tree in self._trees]
        if sum(list(request.values())[: max(matched)]) >= 0.1 * sum(request.values()):
            best = [n for n in range(self._replicas) if matched[n] == max(matched)]
        else:
            least = min(map(len, self._trees))
            best = [n for n in range(self._replicas) if len(self._trees[n]) == least]
        chosen = min(best, key=queues.__getitem__)
        self._trees[chosen].update(ids[:n] for n in range(1, len(ids) + 1))
        return chosen


class ChunkSets:
    """Ours, with the filters that replicas publish."""

    def __init__(self, setting: Setting) -> None:
        self._balancer = Balancer(seed=setting.seed)

    def choose(self, request: Request, queues: Sequence[int]) -> int:
        group, *_ = self._balancer.rank(request, {str(n): queue for n, queue in enumerate(queues)})
        chosen = min(group, key=lambda name: queues[int(name)])
        self._balancer.sent(chosen, request)
        return int(chosen)

    def publish(self, replicas: Sequence[Replica]) -> None:
        self._balancer.update({str(n): routing_stats(one.cache) for n, one in enumerate(replicas)})


ROUTERS: Mapping[str, type[RoundRobin] | type[ChunkSets]] = {
    "round robin": RoundRobin,
    "power of two": PowerOfTwo,
    "first chunk": FirstChunk,
    "prefix affinity": PrefixAffinity,
    "chunk sets": ChunkSets,
}


def simulate(setting: Setting, name: str) -> dict[str, float]:
    """Figures of one router over the last four fifths of the requests.

    ``hit_rate`` is the share of chunk tokens that were cached, ``requests`` and ``work`` the load of the
    busiest replica as a multiple of the mean, ``ttft_s`` the mean time to the end of the prefill.
    """
    router: Router = ROUTERS[name](setting)
    size = setting.topics * setting.per_topic * 200
    replicas = [Replica(setting.cache * size) for _ in range(setting.replicas)]
    mean = setting.chunks * 200 / 2 / setting.speed + setting.decode
    draw, now, published = random.Random(setting.seed + 1), 0.0, -1.0
    hits = tokens = waited = 0.0
    count, work = [0] * setting.replicas, [0.0] * setting.replicas
    for number, request in enumerate(requests(setting)):
        now += draw.expovariate(setting.busy * setting.replicas / mean)
        if now > published + setting.period or published < 0:
            router.publish(replicas)
            published = now
        chosen = router.choose(request, [one.queue(now) for one in replicas])
        replica, total = replicas[chosen], sum(request.values())
        hit = replica.serve(request)
        prefill = (total - hit) / setting.speed
        start = max(now, replica.ends[-1] if replica.ends else 0.0)
        replica.ends.append(start + prefill + setting.decode)
        if number >= setting.requests // 5:
            hits, tokens, waited = hits + hit, tokens + total, waited + start + prefill - now
            count[chosen] += 1
            work[chosen] += prefill + setting.decode
    return {
        "hit_rate": hits / tokens,
        "requests": max(count) / (sum(count) / len(count)),
        "work": max(work) / (sum(work) / len(work)),
        "ttft_s": waited / sum(count),
    }
