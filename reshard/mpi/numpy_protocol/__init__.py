"""numpy's protocols for distributed arrays: what `DistArray` does when numpy's functions and operators meet it.

    tiled_array         what the functions need of an array, a rank's true part (its tile without padding), and
                        elementwise functions, tile by tile, on operands whose dims have one layout
    array_reductions    sums, extrema, means, norms: each rank reduces its true part, a plan finishes the partial result
    contractions        matmul, dot, tensordot: one operand moves to the other, tiles are multiplied, a plan finishes
    array_views         transpose, reshape, slices, concatenate
    numpy_methods       the mixin that `DistArray` derives from, and the table of `__array_function__`

Two rules hold in all of them. Padding is never data: functions see true parts only. And what numpy would do on the
whole array is either done, with the same result on every rank, or refused with an error that says what to do.
"""
