"""What the model of costs says of the contestants of a benchmark."""

from collections.abc import Callable
from dataclasses import replace

from collectives import cost, tuning
from collectives.cost import Case
from collectives.profiles import Profile
from collectives.transport import Endpoint
from collectives.tuning import Tuner

OPERATIONS = {
    "allreduce": "sparse_allreduce",
    "reduce_scatter": "sparse_reduce_scatter",
    "allgather": "sparse_allgather",
    "gtopk": "gtopk_allreduce",
}
Predict = Callable[[str, str, str], float | None]  # subject, algorithm, codec -> seconds, None where the model has none


def predictor(endpoint: Endpoint, network: Profile | None, case: Case) -> Predict:
    """Return what predicts the contestants of a case, by the profile of the communicator.

    network: what to go by instead, as if each rank were on a node of its own. Without a profile, or where it does not
    know such links, the prediction is None. case: without codec and nodes.
    """
    nodes = [1] * endpoint.size
    if network is None:
        nodes = [endpoint.nodes.count(node) for node in sorted(set(endpoint.nodes))]
    profile = network or endpoint.tuner.profile
    if profile is None or not Tuner(profile).knows(nodes):
        return lambda subject, algorithm, codec: None
    known = profile

    def predict(subject: str, algorithm: str, codec: str) -> float | None:
        here = replace(case, nodes=len(nodes), codec="auto" if codec == "-" else codec)
        if algorithm == "MPI_Allreduce":
            return cost.whole_reduction(cost.Model(here, known)).seconds
        if algorithm == "gTop-k tree, as published":
            return cost.predict("gtopk_allreduce", "tree", here, known).seconds
        operation = OPERATIONS[subject]
        if algorithm == "auto":
            return tuning.of_auto(endpoint.tuner, here, nodes, known)
        if algorithm not in cost.OPERATIONS[operation]:
            return None
        return tuning.of_named(operation, algorithm, here, nodes, known)

    return predict
