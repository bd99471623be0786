"""A short one: tests/chaos/soak.py runs for as long as it is told to, and looks at the memory as well."""

import pytest
from soak import grown, soak


@pytest.mark.exactly(4)
@pytest.mark.slow
def test_exchanges_leave_no_descriptor_no_operation_and_no_handle_behind(comm):
    """Good ones, those that fail on a rank, and communicators that come and go. Memory settles later than this."""
    faults, _, _ = grown(soak(comm, 100, looks=10))
    assert set(faults) <= {"memory"}
