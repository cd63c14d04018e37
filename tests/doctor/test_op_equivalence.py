"""The check must accept an operation on each device's own rows, and see every fault that is planted."""

import pytest

from reshard import hlo
from reshard.doctor.dataflow.replicas import Replicas
from reshard.doctor.equivalence import Proofs, Spliced, Traced, check_same_rows
from reshard.errors import SpliceError
from tests.doctor.batched import FFT, HEAD, OWN_FFT, OWN_SORT, SORT, proposed

KNOWN = Proofs()  # What was proved in one test must not let a fault of another pass.


def check(old, new):
    everything = proposed(old)
    after = Traced(hlo.parse(HEAD + new), 4, spliced=True)
    spliced = Spliced(everything.traced, after, "main", {}, KNOWN)
    check_same_rows(spliced, everything.replacement(), Replicas(everything.traced.maps))


def test_an_operation_on_own_rows():
    check(FFT, OWN_FFT)
    check(SORT, OWN_SORT)
    check(FFT, FFT)


@pytest.mark.parametrize(
    ("was", "is_now", "why"),
    [
        ("fft_type=FFT", "fft_type=IFFT", "another operation"),
        ("fft_length={8}", "fft_length={4}", "another operation"),
        ("fft(%p)", "negate(%p)", "another operation"),
        ("dimensions={1,0,2}", "dimensions={1,2,0}", "another place of their rows"),
        (
            "all-to-all(%x), channel_id=2, replica_groups=[1,4]<=[4], dimensions={0}",
            "copy(%x)",
            "other elements|another",
        ),
        ("<=[4]", "<=[2,2]T(1,0)", "other elements|another"),
        ("fft(%p)", "fft(%q)", "other elements"),
        ("reshape(%y)", "negate(%r)", "another operation"),
    ],
)
def test_planted_faults_in_an_fft(was, is_now, why):
    new = OWN_FFT.replace("  %f.1", "  %q = c64[2,8]{1,0} reverse(%p), dimensions={1}\n  %f.1")
    new = new.replace("  ROOT", "  %r = c64[8,2]{1,0} reshape(%y)\n  ROOT")
    assert was in new
    with pytest.raises(SpliceError, match=why):
        check(FFT, new.replace(was, is_now))


@pytest.mark.parametrize(
    ("was", "is_now", "why"),
    [
        ("iota_dimension=1", "iota_dimension=0", "not be the index"),
        ("%less", "%more", "another operation"),
        ("dimensions={1}", "dimensions={0}", "another operation"),
        ("is_stable=true, ", "", "another operation"),
        ("sort(%p,", "sort(%q,", "other elements"),
    ],
)
def test_planted_faults_in_a_sort(was, is_now, why):
    new = OWN_SORT.replace("  %own", "  %q = f32[2,8]{1,0} reverse(%p), dimensions={0}\n  %own")
    with pytest.raises(SpliceError, match=why):
        check(SORT, new.replace(was, is_now))


def test_the_other_result():
    other = OWN_SORT.replace("ROOT %d = s32[2,8]{1,0} get-tuple-element(%own), index=1",
                             "ROOT %d = f32[2,8]{1,0} get-tuple-element(%own), index=0")  # fmt: skip
    with pytest.raises(SpliceError, match="another one of"):
        check(SORT, other)
