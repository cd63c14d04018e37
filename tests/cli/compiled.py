"""Programs for `doctor` and `pass`: StableHLO, optimized HLO, and one in which nothing moves."""

from tests.cli.cases import ROOT

DATA = ROOT / "tests" / "doctor" / "data"

MODULE, COMPILED = DATA / "train.mlir", DATA / "train_v5p_0.12.0.1.hlo"

NOTHING = "HloModule m, num_partitions=4\n\nENTRY %main {\n  ROOT %p = f32[2]{0} parameter(0)\n}\n"
GATHERED = """HloModule m, num_partitions=4

ENTRY %main {
  %p = f32[2,8]{1,0} parameter(0)
  %g = f32[8,8]{1,0} all-gather(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
  ROOT %r = f32[8,8]{1,0} add(%g, %g)
}
"""
