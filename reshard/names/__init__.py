"""Names of arrays, from one framework's to another's, by rules that are data.

    source = "model.layers.{l}.self_attn.{q,k,v}_proj.weight"
    target = "layers.{l}.attn.qkv[{0,1,2}]"

A table in TOML has such rules, with views where arrays are fused, split or interleaved. `read` reads one, its `resolve`
says what each array of a model fills, `moves` gives what `rs.plan_tree` plans, and `inverse` is the way back. Tables
for Llama, Qwen3, Mixtral and DeepSeek-V3 come along (docs/reference/names.md).

>>> table = read('''
... [[rule]]
... source = "layers.{l}.{q,k,v}_proj"
... target = "layers.{l}.qkv[{0,1,2}]"
... ''')
>>> for each in table.resolve({f"layers.0.{name}_proj": (4, 2) for name in "qkv"}):
...     print(each.source, "->", each.target, each.view)
layers.0.q_proj -> layers.0.qkv _0 _1 -> index _0 _1, index=0 of the target's 3
layers.0.k_proj -> layers.0.qkv _0 _1 -> index _0 _1, index=1 of the target's 3
layers.0.v_proj -> layers.0.qkv _0 _1 -> index _0 _1, index=2 of the target's 3
"""

from __future__ import annotations

from reshard.names.rules import NamedView as NamedView
from reshard.names.table import Table as Table
from reshard.names.table import read as read

__all__ = ["NamedView", "Table", "read"]
