# SPDX-License-Identifier: Apache-2.0
"""A struct of DSL scalars for traced functions and kernel parameters."""

import cutlass


class Bundle:
    """DSL scalars as attributes. cutlass flattens and rebuilds it in the order of the fields."""

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
