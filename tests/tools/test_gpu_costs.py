"""What a step starts on a device and waits for does not depend on the number of tensors: benchmarks/gpu_costs.py."""

import sys

import gpu_costs
import pytest
from devices import counted, real_cupy

pytestmark = pytest.mark.skipif(
    real_cupy() is not None, reason="there is a GPU, and no stand-in"
)

# Launches and waits of a step at P = 1, for 1, 54 and 160 tensors: they only fall.
MOST = {
    "Top-k": ((10, 2), (7, 2), (7, 2)),
    "bits=4": ((6, 2), (6, 2), (6, 2)),
    "chunks, two bits": ((10, 3), (10, 3), (10, 3)),
    "SIDCo": ((11, 2), (11, 2), (11, 2)),
    "AdaComp": ((9, 2), (9, 2), (9, 2)),
}


@pytest.mark.parametrize("tensors", [1, pytest.param(54, marks=pytest.mark.slow), 160])
@pytest.mark.parametrize("name", gpu_costs.STEPS)
def test_a_step_starts_and_waits_for_few_things(name, tensors):
    launches, waits = MOST[name][gpu_costs.TENSORS.index(tensors)]
    counts, recorder = gpu_costs.last(name, tensors, 160 * 512, 3)
    assert counts.launches <= launches, counts
    assert counts.synchronisations <= waits, counts
    assert recorder.bytes > 4 * 160 * 512


def test_a_replay_makes_the_same_calls_and_leaves_the_stand_in_as_it_was():
    before = gpu_costs.cupy.ndarray.get
    exchange = gpu_costs.made("bits=4", 2, gpu_costs.MPI.COMM_SELF)
    given = gpu_costs.gradient(2, 640, 0)
    exchange(given, out=given)
    with gpu_costs.Replay() as replay:
        assert replay.time(lambda: exchange(given, out=given), 3) > 0
        assert replay.answers
        assert not replay.left, "all of the recorded copies to the host were asked for"
    assert gpu_costs.cupy.ndarray.get is before
    assert gpu_costs.launch_seconds(3) > 0


def traced_step(name, tensors, trace):
    """Run a step whose frames of the library are traced."""
    exchange = gpu_costs.made(name, tensors, gpu_costs.MPI.COMM_SELF)
    given = gpu_costs.gradient(tensors, 160 * 256, 0)
    for _ in range(2):
        exchange(given, out=given)
    folders = tuple(str(gpu_costs.ROOT / top) for top in ("mpicomp", "collectives"))

    def begin(frame, event, _):
        return trace(frame) if frame.f_code.co_filename.startswith(folders) else None

    sys.settrace(begin)
    exchange(given, out=given)
    sys.settrace(None)


def calls_of_a_step(name, tensors):
    """Return the functions of the library that a step calls in Python."""
    called = []
    traced_step(name, tensors, lambda frame: called.append(frame.f_code.co_name))
    return called


def instructions_of_a_step(name, tensors):
    """Return how many instructions of bytecode a step runs in the library."""
    count = 0

    def note(frame, event, _):
        nonlocal count
        count += event == "opcode"
        return note

    def trace(frame):
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return note

    traced_step(name, tensors, trace)
    return count


@pytest.mark.parametrize("name", gpu_costs.STEPS)
def test_a_step_calls_no_function_for_each_tensor(name):
    few, many = (len(calls_of_a_step(name, tensors)) for tensors in (20, 54))
    assert 100 < many <= few


@pytest.mark.parametrize("name", gpu_costs.TIMED)
def test_a_step_looks_at_each_tensor_a_few_times(name):
    """A buffer that is the gradient itself is not looked at as another array would be."""
    few, many = (instructions_of_a_step(name, tensors) for tensors in (54, 160))
    assert few > 1000
    assert (many - few) / (160 - 54) <= 85


def test_a_table_of_arrays_is_written_where_those_of_the_step_before_were_elsewhere():
    exchange = gpu_costs.made("bits=4", 5, gpu_costs.MPI.COMM_SELF)
    uploads = []
    for seed in (0, 1):
        given = gpu_costs.gradient(5, 640, seed)
        for _ in range(2):
            with counted(gpu_costs.cupy) as counts:
                exchange(given, out=given)
            uploads.append(counts.uploads)
    assert uploads == [1, 0, 1, 0]


@pytest.mark.parametrize("name", gpu_costs.TIMED)
def test_a_step_with_the_arrays_of_the_one_before_uploads_nothing(name):
    exchange = gpu_costs.made(name, 5, gpu_costs.MPI.COMM_SELF)
    given = gpu_costs.gradient(5, 5 * 640, 0)
    for _ in range(3):
        with counted(gpu_costs.cupy) as counts:
            exchange(given, out=given)
    assert counts.uploads == 0, counts


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("name", gpu_costs.TIMED)
def test_steps_take_arrays_that_moved_or_changed(name, returns):
    """Of as many values, of which a step prepared tables before: their bits are the host's."""
    on_device, on_host = (
        gpu_costs.made(name, 5, gpu_costs.MPI.COMM_SELF) for _ in range(2)
    )
    earlier = gpu_costs.gradient(5, 3200, 0)
    for seed in (0, 1, 1, 2):
        given = gpu_costs.gradient(5, 3200, seed)
        if seed == 1:  # one array is as before, two have changed places
            given["tensor 0"] = earlier["tensor 0"]
            given["tensor 1"], given["tensor 2"] = given["tensor 2"], given["tensor 1"]
        host = {name: array.get() for name, array in given.items()}
        mean = on_device(given, out=None if returns else given)
        expected = on_host(host)
        for tensor, array in expected.items():
            assert mean[tensor].get().tobytes() == array.tobytes()
        earlier = given
    given["tensor 3"].shape = (32, 20)
    with pytest.raises(ValueError, match="tensor 3 is float32 of shape"):
        on_device(given, out=given)
    assert on_device.statistics.steps == 1


def test_buffers_that_are_the_gradients_are_those_of_their_bucket():
    """The step gets more of them after a bucket was started."""
    comm = gpu_costs.MPI.COMM_SELF
    given = gpu_costs.gradient(4, 4 * 640, 0)
    host = {name: array.get() for name, array in given.items()}
    expected = gpu_costs.GradientExchange(comm, bits=4)(host)
    exchange = gpu_costs.GradientExchange(comm, bits=4, bucket_nbytes=2 * 4 * 640)
    exchange.register(given)
    for name, array in given.items():
        exchange.start(name, array, out=array)
    means = exchange.finish()
    assert all([means[name] is given[name] for name in given])
    for name, array in given.items():
        assert array.get().tobytes() == expected[name].tobytes()


def test_a_new_mean_takes_one_call_for_each_tensor(monkeypatch):
    array = gpu_costs.cupy.ndarray
    calls = []
    for name in "__getitem__", "reshape", "_make":
        function = vars(array)[name]

        def counting(*args, name=name, function=function, **how):
            calls.append(name)
            return function(*args, **how)

        monkeypatch.setattr(array, name, counting)
    exchange = gpu_costs.made("bits=4", 54, gpu_costs.MPI.COMM_SELF)
    given = gpu_costs.gradient(54, 54 * 64, 0)
    for _ in range(2):
        calls.clear()
        mean = exchange(given)
    assert calls.count("_make") >= 54
    assert len(calls) < 54 + 20
    assert [each.shape for each in mean.values()] == [(64,)] * 54


def parsed(code):
    """Return the places and texts of instructions."""
    lines = [line.split(maxsplit=1) for line in code.strip().splitlines()]
    return [(int(place, 16), text) for place, text in lines]


def test_a_path_is_the_shortest_of_those_with_most_wide_accesses():
    code = parsed("""
        0000 ISETP.NE.AND P0, PT, R0, RZ, PT
        0010 @P0 BRA 0x40
        0020 LDG.E R1, desc[UR4][R2.64]
        0030 BRA 0x60
        0040 LDG.E.128 R4, desc[UR4][R2.64]
        0050 FADD R1, R4, R5
        0060 @!P1 BRA 0x60
        0070 EXIT
        0080 BRA 0x80
    """)
    assert len(gpu_costs.path(code)) == 6
    assert gpu_costs.path(code, 0) == [0, 1, 2, 3, 6, 7]
    assert gpu_costs.path(code, None, ["FADD"]) == [0, 1, 4, 5, 6, 7]


def test_a_path_is_that_of_a_thread_with_work_and_its_loops_count_as_often_as_they_run(
    monkeypatch,
):
    code = parsed("""
        0000 ISETP.GE.AND P0, PT, R0, R1, PT
        0010 @P0 BRA 0x80
        0020 LDG.E R2, desc[UR4][R4.64]
        0030 FLO.U32 R3, R2
        0040 @P1 BRA 0x30
        0050 @P2 BRA 0x70
        0060 STG.E desc[UR4][R6.64], R3
        0070 @P3 BRA 0x20
        0080 EXIT
    """)
    with pytest.raises(AssertionError, match="without work"):
        gpu_costs.path(code)
    found = gpu_costs.path(code, through=["FLO", "STG"])
    assert found == [*range(9)]
    assert gpu_costs.loop_of(code, found, "FLO") == range(3, 5)
    monkeypatch.setitem(gpu_costs.OF_A_THREAD, "kernel", 4)
    monkeypatch.setitem(gpu_costs.THROUGH, "kernel", ("FLO", "STG"))
    monkeypatch.setitem(gpu_costs.TRIPS, "kernel", (("LDG", 10), ("FLO", 3)))
    assert gpu_costs.of_a_value("kernel", code) == (3 + 10 * (4 + 3 * 2)) / 4
