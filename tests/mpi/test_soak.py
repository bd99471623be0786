"""A short one: tests/soak.py runs for as long as it is told to, and looks at the memory as well."""

import pytest
from soak import grown, soak


@pytest.mark.exactly(4)
@pytest.mark.slow
def test_exchanges_leave_no_descriptor_no_operation_and_no_handle_behind(comm):
    """Good ones, those that fail on a rank, and communicators that come and go. Memory settles later than this."""
    faults, _, _ = grown(soak(comm, 100, looks=10))
    assert set(faults) <= {"memory"}


@pytest.mark.exactly(1)
def test_what_grows_is_named(comm):
    flat = {"memory": 1000, "descriptors": 7, "in flight": 0, "handle": 5}
    assert grown([flat] * 20)[0] == []
    for name in flat:
        assert grown([{**flat, name: flat[name] + 20 * step} for step in range(20)])[0] == [name]
