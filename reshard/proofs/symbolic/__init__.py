"""A lowered program run on symbols: what the numpy runtime does to tiles is done here to digits.

**What is proved.** Suppose that the tile of device d holds, at local index e, the element that `meaning(operand)` gives
(a combination of its summands, if the operand is partial). Then after an instruction the tile holds what
`meaning(result)` gives, for every device and every e. The layouts between steps are assertions that the plan brings
along. They need no trust: each must follow from the one before, the first is the source and the last is the target.

**Digits, not numbers.** Both layouts of a step are cut to common digits. Two numerals of the same radices are equal if
and only if their digits are, so a claim about indices is one about single digits, and radices that are not tied to the
mesh can stay names: no product of unknowns occurs. An instruction maps the coordinates and local digits of a receiver
to those of the element's sender. What is left for z3 are equalities of digits, and bounds of padded dims, whose
sizes are numbers.

**Lists are data.** Groups, blocks, pairs and boxes are listed device by device. Arrays compare them with what a formula
in the coordinates gives, exactly and in time linear in the lists; no solver takes part.

    form             the digits of a plan, and the sizes that may vary (trusts `types.layout` alone)
    contract         what a step must do, the digits of its views, and comparing lists of devices
    correctness      a program, step by step; its dtypes and rounds, its buffers and received elements; of slices and
                     collectives, where each element comes from, digit by digit; leaves claims
    transfers        the lists of exchanges and permutes, compared by arrays; exchanges in place, replayed slot by slot
    formulas         exchanges and permutes that are too long to list
    claims           what remains to be decided, as data, and decided: the only file here that needs z3
"""

from reshard.proofs.symbolic.claims import Absent as Absent
from reshard.proofs.symbolic.claims import Claim as Claim
from reshard.proofs.symbolic.claims import Fewer as Fewer
from reshard.proofs.symbolic.claims import Law as Law
from reshard.proofs.symbolic.claims import Lemma as Lemma
from reshard.proofs.symbolic.claims import Query as Query
from reshard.proofs.symbolic.claims import Rounds as Rounds
from reshard.proofs.symbolic.claims import Term as Term
from reshard.proofs.symbolic.claims import decide_claims as decide_claims
from reshard.proofs.symbolic.claims import to_smt2 as to_smt2
from reshard.proofs.symbolic.correctness import Outline as Outline
from reshard.proofs.symbolic.correctness import broken_rule as broken_rule
from reshard.proofs.symbolic.correctness import check_joint_launch as check_joint_launch
from reshard.proofs.symbolic.correctness import check_outside as check_outside
from reshard.proofs.symbolic.correctness import count_received as count_received
from reshard.proofs.symbolic.correctness import derive_claims as derive_claims
from reshard.proofs.symbolic.correctness import list_moments as list_moments
from reshard.proofs.symbolic.form import Form as Form
from reshard.proofs.symbolic.formulas import ByFormula as ByFormula
from reshard.proofs.symbolic.formulas import formula_of_step as formula_of_step
from reshard.proofs.symbolic.transfers import check_view_exchange as check_view_exchange
