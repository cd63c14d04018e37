"""Every notation of a sharding, one module each, read into plain data that `Layout` makes a layout of.

    text             ours                      f32[{y}8, 16, {x}4] + sum{z}
    jax_sharding     JAX, as text              P(('x', 'y'), None, unreduced={'z'})
                     JAX, as objects           NamedSharding(mesh, P('x')), read and made
    hlo              HLO, XLA's compiled text  {devices=[2,1,4]<=[4,2]T(1,0)}
                     Shardy, OpenXLA's         #sdy.sharding<@mesh, [{"y"}, {}, {"x"}]>
    dtensor          PyTorch's placements      [Shard(0), Replicate()] on a mesh of 2 x 4
    scalapack        ScaLAPACK's descriptors   [1, 0, 1000, 800, 64, 32, 0, 0, 512] on a grid of 2 x 3
    einops           views, not shardings      l (three h d) m -> three l h d m

Shared by them: `sharding` has the plain data (`RawSharding`), looks up its axes on a mesh (`place`), and takes text
token by token (`Reader`); `geometry.detect` recognizes the notation of a text.

To add a notation, write a module whose `parse` or `read` returns plain data, give `Layout` a class method that
imports it when called, and, if it is text, add the pattern of its first characters to
`geometry.detect`.
"""
