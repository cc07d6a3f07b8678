# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL kernels. Modules with device code import cutlass; see each module's docstring."""
