"""Plans for chains: which are worth it, on recorded modules."""

from reshard.jax.chain_plans import HloPassOptions
from tests.jax.test_hlo_pass import fates


def test_on_an_accelerator_bytes_must_be_worth_their_launches():
    improved = fates("train_cpu", launches=1 << 20, platform="tpu")
    assert improved.module is None
    assert any("more collectives" in fate.why and "would save" in fate.why for fate in improved.fates)
    improved = fates("train_cpu", HloPassOptions(budget=1), launches=1 << 20, platform="cpu")
    assert not any("more collectives" in fate.why for fate in improved.fates)
