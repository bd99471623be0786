"""Settings: what is accepted becomes a plain Python value, and what is refused is named."""

import re
from functools import partial

import numpy as np
import pytest

from mpicomp import (
    AdaComp,
    AggregationAware,
    ChunkedTopK,
    Dense,
    ErrorFeedback,
    MomentumCorrection,
    Quantised,
    SIDCo,
    StepAhead,
    TopK,
    WarmUp,
)
from mpicomp.settings import to_bool, to_choice, to_integer, to_number


@pytest.mark.parametrize(
    ("plain", "expected"),
    [
        (to_integer("k", np.int64(5)), 5),
        (to_integer("k", 2**63 - 1), 2**63 - 1),
        (to_number("rate", np.float32(0.5)), 0.5),
        (to_number("rate", np.int8(2), least=0), 2.0),
        (to_number("momentum", 0, least=0, below=1), 0.0),
        (to_bool("nesterov", np.True_), True),
        (to_choice("average", np.False_, [True, False, "sign"]), False),
        (to_choice("average", np.str_("sign"), [True, False, "sign"]), "sign"),
        (to_choice("clip", None, ["median", None]), None),
    ],
)
def test_accepted_settings_are_plain_values(plain, expected):
    assert type(plain) is type(expected)
    assert plain == expected


@pytest.mark.parametrize(
    ("check", "error", "message"),
    [
        (lambda: to_integer("k", True), TypeError, "k is True: expected an integer"),
        (
            lambda: to_integer("k", 2.0, remedy="; or density"),
            TypeError,
            "k is 2.0: expected an integer; or density",
        ),
        (lambda: to_integer("k", np.timedelta64(2)), TypeError, "expected an integer"),
        (
            lambda: to_integer("k", 0),
            ValueError,
            "k is 0: expected an integer of at least 1, below 2^63",
        ),
        (
            lambda: to_integer("root", 4, 0, 3),
            ValueError,
            "root is 4: expected an integer from 0 to 3",
        ),
        (lambda: to_number("rate", np.bool_(1)), TypeError, "expected a number"),
        (lambda: to_number("rate", "1"), TypeError, "rate is '1': expected a number"),
        (lambda: to_number("rate", 1j), TypeError, "rate is 1j: expected a number"),
        (lambda: to_number("rate", np.timedelta64(2)), TypeError, "expected a number"),
        (
            lambda: to_number("rate", np.inf, above=0),
            ValueError,
            "rate is inf: expected 0 < rate < infinity",
        ),
        (
            lambda: to_number("rate", np.nan),
            ValueError,
            "rate is nan: expected -infinity < rate < infinity",
        ),
        (
            lambda: to_number("decay", 2, above=0, most=1),
            ValueError,
            "decay is 2: expected 0 < decay <= 1",
        ),
        (
            lambda: to_bool("nesterov", 1),
            TypeError,
            "nesterov is 1: expected True or False",
        ),
        (
            lambda: to_choice("average", 1, [True, "sign"]),
            ValueError,
            "average is 1: expected one of [True, 'sign']",
        ),
        (
            lambda: to_choice("bits", 4.0, (8, 4)),
            ValueError,
            "bits is 4.0: expected one of [8, 4]",
        ),
        (
            lambda: to_choice("bits", np.ones(2), (8, 4)),
            ValueError,
            "expected one of [8, 4]",
        ),
    ],
)
def test_refused_settings_are_named(check, error, message):
    with pytest.raises(error, match=re.escape(message)):
        check()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (TopK, {"k": 3}),
        (ChunkedTopK, {"k": 4, "chunk": 64}),
        (AdaComp, {"bin_size": 50}),
        (
            SIDCo,
            {
                "density": 0.5,
                "distribution": "exponential",
                "stages": 4,
                "adaptation": "control",
            },
        ),
        (
            AggregationAware,
            {
                "density": 0.5,
                "metric": "support",
                "weight": 1.0,
                "quota": 0.75,
            },
        ),
        (partial(Quantised, Dense()), {"form": "two_bit"}),
        (partial(WarmUp, TopK(0.5)), {"densities": [1.0, 0.5], "calls": 2}),
        (ErrorFeedback, {"in_place": False, "decay": 1.0}),
        (MomentumCorrection, {"momentum": 0.0, "masking": True}),
        (StepAhead, {"rate": 1.0, "momentum": 0.0}),
    ],
)
def test_constructors_store_plain_values(kind, settings):
    """Settings of NumPy, and integers for numbers, have the text that is compared between ranks and states."""
    numpys = {name: np.array(value)[()] for name, value in settings.items()}
    integers = {
        name: int(value)
        for name, value in settings.items()
        if type(value) is float and value == int(value)
    }
    assert (
        repr(kind(**numpys))
        == repr(kind(**settings))
        == repr(kind(**{**settings, **integers}))
    )
