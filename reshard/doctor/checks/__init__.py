"""Whether a module that the pass has rewritten still computes what it did; nothing else lets a replacement through.

equivalence   traces the rewritten module, and compares where each user gets its elements from; for operations on the
              rows that each device has, which rows these are
proofs        keeps what was proved of a chain, for equal ones
"""
