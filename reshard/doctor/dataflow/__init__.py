"""Values and elements followed through a compiled module: where each came from, on which device.

flow         sees through fusions, tuples and asynchronous calls to where a value is made and used, and recognizes equal
             values (`Numbering`)
scalars      evaluates the integers that depend only on the device: offsets of slices
index_maps   knows, for each instruction that only moves data, where each element was before, and how it was rounded
             (`Conversion`); in compiled plans, too
trace        follows elements back to where they were made, and sums to the summands that they are made of
replicas     knows which devices surely have equal values

It knows nothing of collectives that could be replaced, nor of plans: the examination and the pass build on it.
"""
