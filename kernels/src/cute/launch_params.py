# SPDX-License-Identifier: Apache-2.0
"""Kernel parameters in order, shared by the launch code and the traced code.

All are plain integers and floats, so a launch does not need cutlass. An address is that of the
first element; strides are in elements.
"""

ADDRESS, STRIDE, INT, FLOAT = "address", "stride", "int", "float"

# Dtypes of sinks.
SCALAR_DTYPES = ("float32", "bfloat16", "float16")

# Two TMA descriptors, for K and V, come before all other parameters.
FORWARD_PARAMETERS = (
    ("query", ADDRESS),
    ("output", ADDRESS),
    ("key", ADDRESS),
    ("value", ADDRESS),
    ("tail_key", ADDRESS),
    ("tail_value", ADDRESS),
    ("plan", ADDRESS),
    ("parents", ADDRESS),
    ("table", ADDRESS),
    # [parts, part_rows, Hq, Dh] and [parts, part_rows, Hq] float32
    ("part_out", ADDRESS),
    ("part_lse", ADDRESS),
    # [R, 2] int32, written: slot of a tree's first part and number of its parts
    ("part_record", ADDRESS),
    # [Hq] in `sink_dtype`; 0: none
    ("sinks", ADDRESS),
    ("query_row", STRIDE),
    ("query_head", STRIDE),
    ("output_row", STRIDE),
    ("output_head", STRIDE),
    ("key_block", STRIDE),
    ("key_slot", STRIDE),
    ("key_head", STRIDE),
    ("value_block", STRIDE),
    ("value_slot", STRIDE),
    ("value_head", STRIDE),
    ("tail_key_row", STRIDE),
    ("tail_key_head", STRIDE),
    ("tail_value_row", STRIDE),
    ("tail_value_head", STRIDE),
    ("num_trees", INT),
    ("num_kv_heads", INT),
    ("group", INT),
    # target number of parts of all trees together; 0: chosen by their lengths
    ("forced_parts", INT),
    # blocks that the device runs at once, and slots of the grid
    ("resident_ctas", INT),
    ("slots", INT),
    # block size of the cache is 1 << page_shift
    ("page_shift", INT),
    # entries of a row of the block table
    ("table_width", INT),
    ("part_rows", INT),
    # 1: every row attends all rows of its tree
    ("full", INT),
    # 1: tails are dense
    ("dense", INT),
    # index in SCALAR_DTYPES
    ("sink_dtype", INT),
    # positions that a row attends, including its own; 0: all
    ("window", INT),
    # scale times log2(e)
    ("scale_log2", FLOAT),
)

COMBINE_PARAMETERS = (
    ("output", ADDRESS),
    ("plan", ADDRESS),
    ("part_out", ADDRESS),
    ("part_lse", ADDRESS),
    ("part_record", ADDRESS),
    ("output_row", STRIDE),
    ("output_head", STRIDE),
    ("num_trees", INT),
    ("num_heads", INT),
    ("part_rows", INT),
)
