"""Which bytes move where when a stored array gets other chunks: the fewest that are read and written within a memory.

    grids      how grids of chunks along one dim meet: reads of a cut, windows of a sweep, segments of two grids
    one_pass   direct and sweep: regions whose target chunks are assembled while source chunks stream by
    spill      the rest goes through files, in one pass or several, while a part of it is assembled as it is read
    choose     all of them enumerated, and the cheapest as an `ArrayRechunk`

A plan knows shapes, chunks, bytes and how many processes join; it sees neither paths nor ranks.
"""

from reshard.synth.rechunking.choose import plan_rechunking as plan_rechunking
