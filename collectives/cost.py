"""What a collective costs: seconds, bytes of the busiest rank, and rounds. Pure functions, with no MPI in them.

Each function here follows the algorithm of its name round by round: which vector travels, how large it is expected to
be, and what a rank computes on it. Sizes are those of the real messages, in every format of the codec; times come from
the curves of a `Profile`. So a prediction at a million ranks takes as long as one at four.

The expected support of the sum of j ranks, n positions, k entries of each: without overlap n (1 - (1 - k/n)^j), the
union of independent sets. Where a share of the entries stands at positions that all ranks have, those count once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from collectives.partition import likely, samples_of
from collectives.profiles import Profile
from collectives.schedule import core_size

LINE = 64  # bytes: messages are padded to it, see `collectives.transport`
HEADERS = 64  # bytes of a block before its entries: the envelope and the codec's header
CLOSE_HEAD = 28  # bytes: what stands behind values that are close together, and the ends of their planes
CLOSE = 7 / 8  # of the bits of a value: those of 16 octaves instead of the 256 of a float32, say
FRACTION_BITS = {2: 10, 4: 23, 8: 52}  # of a value of so many bytes


def expected_union(length: int, counts: Sequence[int]) -> float:
    """Return how many positions `counts` entries a rank take up together if the supports are independent."""
    missing = 1.0
    for count in counts:
        missing *= 1 - count / length if length else 1.0
    return length * (1 - missing)


@dataclass(frozen=True)
class Cost:
    """What a rank spends; of two parts one after the other it is the sum. `nbytes`: sent by the busiest rank."""

    seconds: float = 0.0
    nbytes: float = 0.0
    rounds: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.seconds + other.seconds, self.nbytes + other.nbytes, self.rounds + other.rounds)


@dataclass(frozen=True)
class Case:
    """What is summed: `ranks` vectors of `length` with `entries` entries each.

    overlap: the share of a rank's entries whose positions all ranks have. value_nbytes, codec: of an entry, as in the
    collectives; "auto" takes whatever is faster for a message. nodes: the ranks are spread evenly over so many. team:
    how many ranks of the whole an owner of an entry stands for, where sums go on between nodes; share: the part of the
    index space that is dealt with; crowd: how many ranks use the link of a node at the same time.
    """

    ranks: int
    length: int
    entries: float
    overlap: float = 0.0
    value_nbytes: int = 4
    codec: str = "auto"
    nodes: int = 1
    team: int = 1
    share: float = 1.0
    crowd: int = 1

    @cached_property
    def index_nbytes(self) -> int:
        """Bytes of a plain index."""
        return 4 if self.length <= 2**31 - 1 else 8

    @cached_property
    def per_node(self) -> int:
        """Ranks of a node."""
        return -(-self.ranks // self.nodes)

    @cached_property
    def span(self) -> float:
        """Positions that are dealt with."""
        return self.length * self.share

    def union(self, ranks: float) -> float:
        """Return the expected entries of the sum of so many ranks."""
        together = self.overlap * self.entries
        room, own = self.length - together, self.entries - together
        if own <= 0 or room <= 0:
            return self.share * self.entries
        density = min(1.0, own / room)
        missing = math.exp(ranks * self.team * math.log1p(-density)) if density < 1 else 0.0
        return self.share * (together + room * (1 - missing))


@dataclass(frozen=True)
class Message:
    """A block: its bytes, and the seconds to write and to read it."""

    nbytes: int
    packing: float
    unpacking: float


class Model:
    """A case on a machine: what the steps of the algorithms cost."""

    def __init__(self, case: Case, profile: Profile) -> None:
        self.case, self.profile = case, profile
        self.core = core_size(case.ranks)
        self.beyond = case.ranks - self.core

    def kernel(self, name: str, entries: float) -> Cost:
        """Return what a kernel takes for so many entries."""
        return Cost(self.profile.kernels[name](entries))

    def message(self, entries: float, span: float, *, far: bool = True, value_nbytes: int | None = None) -> Message:
        """Return the block of a vector with so many entries among `span` positions."""
        values = self.case.value_nbytes if value_nbytes is None else value_nbytes
        return self.best(entries, span, values, far=far and self.case.nodes > 1)

    def best(self, entries: float, span: float, value_nbytes: int, *, far: bool) -> Message:
        """Return the block in the codec of the case; with "auto", in the one in which it is there first."""
        codec = self.codec(entries, span, value_nbytes, far=far)
        return self.block(entries, span, value_nbytes, codec)

    def codec(self, entries: float, span: float, value_nbytes: int, *, far: bool) -> str:
        """Return the codec of the case; for "auto" the one in which a message of its own is there first."""
        if self.case.codec != "auto":
            return self.case.codec

        def seconds(codec: str) -> float:
            block = self.block(entries, span, value_nbytes, codec)
            return self.link(block.nbytes, far=far) + block.packing + block.unpacking

        return min(("quick", "smallest"), key=seconds)

    def block(self, entries: float, span: float, value_nbytes: int, codec: str) -> Message:
        """Return the block in a codec."""
        form, indices = index_section(entries, span, self.case.index_nbytes, codec, bare=not value_nbytes)
        values = value_section(entries, value_nbytes, codec, everywhere=form == "range")
        nbytes = -(-math.ceil(HEADERS + indices + values) // LINE) * LINE
        kind = "_coded" if codec == "smallest" and entries else "_bitmap" if form == "bitmap" else ""
        kernels = self.profile.kernels
        return Message(nbytes, kernels["pack" + kind](entries), kernels["unpack" + kind](entries))

    def link(self, nbytes: float, *, far: bool, crowd: int = 1) -> float:
        """Return the seconds of an exchange; `crowd` ranks share the link of their node."""
        between, inside = self.profile.between, self.profile.inside
        if far and between:
            return between(nbytes * max(crowd, self.case.crowd))
        curve = inside or between
        return curve(nbytes) if curve else 0.0

    def crossing(self, distance: int) -> tuple[bool, int]:
        """Return whether ranks so far apart are on different nodes, and how many of a node talk at the same time."""
        far = self.case.nodes > 1 and distance >= self.case.per_node
        return far, self.case.per_node if far else 1

    def exchange(self, entries: float, span: float, distance: int = 1) -> Cost:
        """Return what it costs to swap vectors with a partner, or to pass one on."""
        far, crowd = self.crossing(distance)
        block = self.message(entries, span, far=far)
        seconds = self.link(block.nbytes, far=far, crowd=crowd) + block.packing + block.unpacking
        return Cost(seconds, block.nbytes, 1)

    def gather(self, block: Message) -> Cost:
        """Return what it costs to gather one such block of every rank on every rank."""
        ranks, distance = self.case.ranks, 1
        seconds = block.packing + (ranks - 1) * block.unpacking
        while distance < ranks:
            far, crowd = self.case.nodes > 1, min(distance, self.case.per_node)
            seconds += self.link(min(distance, ranks - distance) * block.nbytes, far=far, crowd=crowd)
            distance *= 2
        return Cost(seconds, (ranks - 1) * block.nbytes, upper(ranks))

    def all_to_all(self, block: Message) -> Cost:
        """Return what it costs to send such a block to every other rank in one step."""
        others = self.case.ranks - 1
        if not others:
            return Cost()
        away = self.case.ranks - self.case.per_node if self.case.nodes > 1 else 0
        links = self.link(away * block.nbytes, far=True, crowd=self.case.per_node) if away else 0.0
        links += self.link((others - away) * block.nbytes, far=False) if others > away else 0.0
        seconds = links + (others - 1) * self.profile.message + others * (block.packing + block.unpacking)
        return Cost(seconds, others * block.nbytes, 1)

    def agreed(self) -> Cost:
        """Return what it costs to compare the terms over the schedule of recursive doubling."""
        cost = Cost()
        for distance in doublings(self.core):
            cost += self.exchange(0, 0, distance)
        return cost + self.unfold(0) + Cost(self.fold(0).seconds, 0, self.fold(0).rounds)

    def fold(self, entries: float) -> Cost:
        """Return what it costs to add the ranks beyond the core to core ranks; those send nothing."""
        if not self.beyond:
            return Cost()
        return replace(self.exchange(entries, self.case.span, self.core), nbytes=0) + self.merge(2 * entries)

    def unfold(self, entries: float) -> Cost:
        """Return what it costs to give the ranks beyond the core the result."""
        return self.exchange(entries, self.case.span, self.core) if self.beyond else Cost()

    def merge(self, entries: float) -> Cost:
        """Return what it costs to add two vectors that have so many entries together; none is free."""
        return self.kernel("merge", entries) if entries else Cost()

    def add_up(self, parts: int, entries: float) -> Cost:
        """Return what it costs to add several vectors that have so many entries together."""
        return Cost() if parts < 2 else self.kernel("merge" if parts == 2 else "accumulate", entries)


def upper(ranks: int) -> int:
    """Return ceil(lg ranks)."""
    return (ranks - 1).bit_length()


def doublings(core: int) -> list[int]:
    """Return 1, 2, 4, ... core / 2."""
    return [1 << step for step in range(core.bit_length() - 1)]


def index_section(entries: float, span: float, index_nbytes: int, codec: str, *, bare: bool) -> tuple[str, float]:
    """Return the format that a codec takes for the indices, and its bytes. bare: entries without values.

    entries spread evenly over `span` positions. See `mpicomp.codec.indices` for the formats.
    """
    plain = 8 * math.ceil(entries * index_nbytes / 8)
    if codec == "plain" or entries < 1:
        return "plain", plain
    found = span * (entries - 1) / (entries + 1) + 1 if entries < span else span  # from the first to the last of them
    sizes: dict[str, float] = {"bitmap": 16 + 8 * math.ceil(found / 64)}
    if entries > span - 0.5 and not bare:
        sizes["range"] = 8
    if codec == "quick":
        form = min(sizes, key=sizes.__getitem__)
        return (form, sizes[form]) if 4 * sizes[form] <= plain else ("plain", plain)
    low = max(0, int(found / entries).bit_length() - 1)
    sizes["elias_fano"] = 16 + 8 * (math.ceil(entries * low / 64) + 1 + math.ceil((entries + found / 2**low) / 64))
    sizes["blocks"] = 16 + 4 * math.ceil(found / 65536 + 1) + 2 * entries
    sizes["plain"] = plain
    form = min(sizes, key=sizes.__getitem__)
    return form, sizes[form]


def value_section(entries: float, value_nbytes: int, codec: str, *, everywhere: bool) -> float:
    """Return the bytes of the values: what is selected is expected within 16 octaves, see `mpicomp.codec.values`.

    everywhere: values of all positions have zeros among them.
    """
    plain = entries * value_nbytes
    return plain if codec != "smallest" or everywhere else min(plain, CLOSE_HEAD + plain * CLOSE)


# The algorithms of sparse_allreduce. `told`: whether samples of the indices travel in the survey.


def survey(model: Model, *, told: bool) -> Cost:
    """Return what it costs to tell all ranks what each brings."""
    case = model.case
    samples = samples_of(int(case.entries), case.ranks) if told else 0
    return model.gather(model.message(samples, case.span, value_nbytes=0))


def allgather(model: Model) -> Cost:
    """See `collectives.allreduce.allgather`."""
    case = model.case
    entries = case.union(1)
    return model.gather(model.message(entries, case.span)) + model.add_up(case.ranks, case.ranks * entries)


def recursive_doubling(model: Model) -> Cost:
    """See `collectives.allreduce.recursive_doubling`; rank 0 is the busiest: others fold into the first core ranks."""
    case, cost = model.case, model.fold(model.case.union(1))
    for block in doublings(model.core):
        held = case.union(block + min(block, model.beyond))
        cost += model.exchange(held, case.span, block) + model.merge(2 * held)
    return cost + model.unfold(case.union(case.ranks))


def split(model: Model) -> Cost:
    """Return what it costs that every rank adds up its share."""
    case, entries = model.case, model.case.union(1)
    block = model.message(entries / case.ranks, case.span / case.ranks)
    return model.all_to_all(block) + model.add_up(case.ranks, entries)


def split_allgather(model: Model) -> Cost:
    """See `collectives.allreduce.split_allgather`."""
    case = model.case
    union = case.union(case.ranks)
    shares = model.gather(model.message(union / case.ranks, case.span / case.ranks))
    return split(model) + shares + model.kernel("join", union)


def dense(model: Model) -> Cost:
    """See `collectives.allreduce.dense`."""
    case = model.case
    piece = case.span / case.ranks
    pieces = model.kernel("fill", piece) + model.gather(model.message(piece, piece))
    return split(model) + pieces + model.kernel("join", case.span)


def dense_mpi(model: Model) -> Cost:
    """See `collectives.allreduce.dense_mpi`."""
    return model.kernel("fill", model.case.span) + whole_reduction(model)


def whole_reduction(model: Model) -> Cost:
    """Return what MPI's own Allreduce of the dense vector costs; float16 travels as float32."""
    return reduction(model, model.case.span * max(4, model.case.value_nbytes))


def reduction(model: Model, nbytes: float) -> Cost:
    """Return what MPI's own Allreduce of so many bytes costs; its bytes are the least that one can send."""
    case, profile = model.case, model.profile
    if case.ranks == 1:
        return Cost()
    if profile.ranks == 1:
        return Cost(2 * upper(case.ranks) * model.link(0, far=case.nodes > 1), 2 * nbytes, 1)
    start = profile.reduce.start
    rest = profile.reduce(nbytes) - start
    before, now = 1 - 1 / profile.ranks, 1 - 1 / case.ranks
    seconds = start * upper(case.ranks) / upper(profile.ranks) + rest * now / before
    return Cost(max(0.0, seconds), 2 * now * nbytes, 2 * upper(case.ranks))


def recursive_halving(model: Model) -> Cost:
    """See `collectives.allreduce.recursive_halving`."""
    case, core, cost = model.case, model.core, model.fold(model.case.union(1))
    for step, distance in enumerate(reversed(doublings(core))):
        team = 2**step  # core ranks whose sum rank 0 holds: the multiples of core / team
        held = case.union(team + min(team, -(-model.beyond * team // core))) / 2**step
        cost += model.exchange(held / 2, case.span / 2 ** (step + 1), distance) + model.merge(held)
    union = case.union(case.ranks)
    for block in doublings(core):
        cost += model.exchange(union * block / core, case.span * block / core, block)
        cost += model.merge(2 * union * block / core)
    return cost + model.unfold(union)


def node_leaders(model: Model) -> Cost:
    """See `collectives.allreduce.node_leaders`; the busiest rank is the leader of a node."""
    case = model.case
    node = Model(replace(case, ranks=case.per_node, nodes=1), model.profile)
    leaders = Model(replace(case, ranks=case.nodes, team=case.team * case.per_node), model.profile)
    cost, union = Cost(), case.union(case.ranks)
    for child in doublings(1 << upper(case.per_node)):
        held = case.union(child)
        cost += replace(node.exchange(held, case.span), nbytes=0) + node.merge(2 * held)
    cost += inner(leaders)
    for _ in range(upper(case.per_node)):
        cost += node.exchange(union, case.span)
    return cost


def node_lanes(model: Model) -> Cost:
    """See `collectives.allreduce.node_lanes`."""
    case, lanes = model.case, model.case.per_node
    node = Model(replace(case, ranks=lanes, nodes=1), model.profile)
    between = replace(case, ranks=case.nodes, team=case.team * lanes, share=case.share / lanes, crowd=lanes)
    union = case.union(case.ranks)
    shares = node.gather(node.message(union / lanes, case.span / lanes))
    return split(node) + inner(Model(between, model.profile)) + shares + node.kernel("join", union)


def inner(model: Model) -> Cost:
    """Return the cost of the fastest sum between nodes."""
    return min((ALLREDUCE[name](model) for name in FLAT), key=lambda cost: cost.seconds)


FLAT = ("recursive_doubling", "allgather", "split_allgather", "recursive_halving", "dense")
ALLREDUCE: dict[str, Callable[[Model], Cost]] = {
    "recursive_doubling": recursive_doubling,
    "allgather": allgather,
    "split_allgather": split_allgather,
    "recursive_halving": recursive_halving,
    "dense": dense,
    "dense_mpi": dense_mpi,
    "node_leaders": node_leaders,
    "node_lanes": node_lanes,
}
SAMPLED = ("split_allgather", "recursive_halving", "node_leaders", "node_lanes")


# gTop-k: k is the number of entries that a rank brings.


def select(model: Model, entries: float, k: float) -> Cost:
    """Return what it costs to keep the k largest of so many."""
    return model.kernel("select", entries) if entries > k else Cost()


def gtopk_doubling(model: Model) -> Cost:
    """See `collectives.gtopk.recursive_doubling`."""
    case, k = model.case, model.case.entries
    cost = model.fold(k)
    for block in doublings(model.core):
        cost += model.exchange(k, case.span, block)
        cost += model.merge(2 * k) + select(model, case.union(2), k) + model.merge(case.union(2) - k)
    return cost + model.unfold(k)


def gtopk_tree(model: Model) -> Cost:
    """See `collectives.gtopk.tree`; the busiest rank is the root."""
    case, k, cost = model.case, model.case.entries, model.agreed()
    rejected = case.union(2) - k
    for child in doublings(1 << upper(case.ranks)):
        cost += replace(model.exchange(k, case.span, child), nbytes=0)
        cost += model.merge(2 * k) + select(model, case.union(2), k) + model.merge(rejected)
    for child in doublings(1 << upper(case.ranks)):
        cost += model.exchange(k, case.span, child)
    return cost


def gtopk_exact(model: Model) -> Cost:
    """See `collectives.gtopk.exact`; what is chosen is spread at random over the shares, so it gathers once."""
    case = model.case
    share = case.union(case.ranks) / case.ranks
    sent = min(likely(case.entries / case.ranks, case.ranks), share)
    cost = split(model) + select(model, share, sent) + model.gather(model.message(sent, case.span / case.ranks))
    some = case.ranks * sent
    return cost + model.kernel("join", some) + select(model, some, case.entries)


def gtopk_exact_doubling(model: Model) -> Cost:
    """See `collectives.gtopk.exact_doubling`."""
    union = model.case.union(model.case.ranks)
    cost = recursive_doubling(model) + select(model, union, model.case.entries)
    return cost + model.kernel("select", model.case.entries)


# The others.


def dissemination(model: Model) -> Cost:
    """See `collectives.allgather.dissemination`."""
    return model.gather(model.message(model.case.entries, model.case.span))


def mpi(model: Model) -> Cost:
    """See `collectives.dense`: the terms, and MPI's own Allreduce of a copy."""
    return model.gather(model.message(0, 0)) + model.kernel("copy", model.case.span) + whole_reduction(model)


OPERATIONS: dict[str, dict[str, Callable[[Model], Cost]]] = {
    "sparse_allreduce": ALLREDUCE,
    "gtopk_allreduce": {
        "recursive_doubling": gtopk_doubling,
        "tree": gtopk_tree,
        "exact": gtopk_exact,
        "exact_doubling": gtopk_exact_doubling,
    },
    "sparse_reduce_scatter": {"split": split},
    "sparse_allgather": {"dissemination": dissemination},
    "dense_allreduce": {"mpi": mpi},
}


def predict(operation: str, algorithm: str, case: Case, profile: Profile, *, asked: bool = True) -> Cost:
    """Return what an operation costs by an algorithm.

    asked: for `sparse_allreduce`, with the round in which the ranks tell each other what they bring.
    """
    model = Model(case, profile)
    cost = OPERATIONS[operation][algorithm](model)
    if operation == "sparse_allreduce" and asked:
        cost += survey(model, told=algorithm in SAMPLED)
    return cost + begun(operation, model)


def begun(operation: str, model: Model) -> Cost:
    """Return what it costs to begin: to look at every entry that is brought, and to set the terms."""
    entries = 0.0 if operation == "dense_allreduce" else model.case.entries
    return Cost(model.profile.call) + model.kernel("validate", entries)


def lower_bound(operation: str, case: Case, profile: Profile) -> Cost:
    """Return the least that messages at the rates of a profile take: seconds, bytes of a rank, and rounds.

    Rounds: ceil(lg P) of one message each, but one of several messages in a reduce-scatter. Seconds: those bytes over
    the faster of the two links, or what has to leave a node over the link between nodes, whichever takes longer.
    """
    ranks, nodes = case.ranks, case.nodes
    if ranks == 1:
        return Cost()
    model, nbytes = Model(case, profile), least_nbytes(operation, case)
    rounds = 1 if operation == "sparse_reduce_scatter" else upper(ranks)
    start, seconds = min((model.link(0, far=far), model.link(nbytes, far=far)) for far in links(case))
    if 1 < nodes < ranks:
        seconds = max(seconds, model.link(least_nbytes(operation, as_nodes(operation, case)), far=True))
    return Cost(rounds * start + max(0.0, seconds - start), nbytes, rounds)


def links(case: Case) -> list[bool]:
    """Return which links a rank has: one to the other nodes (True), one inside its own."""
    return [far for far, there in ((True, case.nodes > 1), (False, case.per_node > 1)) if there]


def as_nodes(operation: str, case: Case) -> Case:
    """Return the case of the nodes as if each were one rank: with the entries of which something has to leave it."""
    own, inside = case.union(1), case.union(case.per_node)
    entries = {"sparse_allgather": case.per_node * own, "gtopk_allreduce": own}.get(operation, inside)
    together = case.overlap * own / entries if entries else 0.0
    return replace(case, ranks=case.nodes, entries=entries, overlap=together)


def least_nbytes(operation: str, case: Case) -> float:
    """Return the least bytes that a rank has to send, or to receive, on average.

    Exact sums: k + K (P-2)/P entries, K those of the union; gTop-k: 2 (P-1)/P k; reduce-scatter: (P-1)/P k;
    allgather: (P-1) k; dense: 2 (P-1)/P n values. An entry: the entropy of its index, and a sign and a fraction.
    """
    ranks, part, own = case.ranks, 1 - 1 / case.ranks, case.union(1)
    entry, sums = entry_nbytes(case, own), entry_nbytes(case, case.union(ranks))
    return {
        "sparse_allreduce": own * entry + case.union(ranks) * (ranks - 2) / ranks * sums,
        "gtopk_allreduce": 2 * part * own * entry,
        "sparse_reduce_scatter": part * own * entry,
        "sparse_allgather": (ranks - 1) * own * entry,
        "dense_allreduce": 2 * part * case.span * case.value_nbytes,
    }[operation]


def entry_nbytes(case: Case, entries: float) -> float:
    """Return the least bytes of an entry, of so many in random places."""
    density = min(1.0, entries / case.span) if case.span else 1.0
    return least_value_nbytes(case.value_nbytes) + index_bits(density) / 8


def least_value_nbytes(value_nbytes: int) -> float:
    """Return the bytes of the sign and the fraction of a value: an exponent may be that of all of them."""
    return (1 + FRACTION_BITS[value_nbytes]) / 8


def index_bits(density: float) -> float:
    """Return the entropy of an index among random places, in bits: about log2(1 / density) + 1.44 for a small one."""
    if not 0 < density < 1:
        return 0.0
    return -math.log2(density) - (1 - density) * math.log1p(-density) / density / math.log(2)
