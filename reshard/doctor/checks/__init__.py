"""Whether a module that the pass has rewritten still computes what it did; nothing else lets a replacement through.

equivalence     traces the rewritten module, and compares where each user gets its elements from
op_equivalence  the same of operations that run on the rows that each device has
proofs          keeps what was proved of a chain, for equal ones
"""
