# SPDX-License-Identifier: Apache-2.0
"""Named scalars that travel together through traced functions and kernel parameters."""

import cutlass


class Bundle:
    """Scalars of the DSL as attributes, in the order given; cutlass takes it apart and back."""

    def __init__(self, **fields) -> None:
        self.__dict__.update(fields)

    def __extract_mlir_values__(self) -> list:
        values = []
        for field in self.__dict__.values():
            values += cutlass.extract_mlir_values(field)
        return values

    def __new_from_mlir_values__(self, values: list) -> "Bundle":
        fields, rest = {}, list(values)
        for name, field in self.__dict__.items():
            count = len(cutlass.extract_mlir_values(field))
            fields[name] = cutlass.new_from_mlir_values(field, rest[:count])
            rest = rest[count:]
        return Bundle(**fields)
