from collectives.runtime.group import _digest

CALL = {
    "operation": "gtopk_allreduce",
    "algorithm": "tree",
    "length": 10,
    "dtype": "float32",
    "width": None,
    "k": 5,
}


def test_every_argument_has_its_part_in_the_digest():
    others = [{**CALL, name: 7} for name in CALL]
    digests = [_digest(tuple(each), tuple(each.values())) for each in (CALL, *others)]
    assert len(set(digests)) == 1 + len(CALL)
    assert _digest(tuple(again := dict(CALL)), tuple(again.values())) == digests[0]
