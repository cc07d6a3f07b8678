# SPDX-License-Identifier: Apache-2.0
"""How many nodes each request may draft in a step."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
