"""Arrays of any library, converted by `frameworks`; where they are: `device`, `memory`; what they hold: `values`."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Buffer = NDArray[np.uint8]
Dtype = np.dtype[Any]
# A commit calls it; it allocates nothing and cannot fail.
Write = Callable[[], None]
ByName = Mapping[str, Any]  # arrays, parameters, states or settings
