"""A lowered program run on symbols: what the numpy runtime does to tiles, done to digits.

**What is shown.** Let the tile of device d hold, at local index e, the element that `meaning(operand)` says (a
combination of its summands, where the operand is partial). Then after an instruction the tile holds what
`meaning(result)` says, for every device and every e. The layouts between steps are assertions that a plan
brings along; nobody has to trust them, since each must follow from the one before, the first is the
source and the last the target.

**Digits, not numbers.** Both layouts of a step are cut to common digits (`form.atoms_of`). Two numerals of the same
radices are equal if and only if their digits are, so a claim about indices is one about single digits, and
radices that nothing ties to the mesh can stay names: no product of unknowns occurs. An instruction maps the
coordinates and local digits of a receiver to those of the element's sender (`collectives`). What is left for z3
are equalities of digits, and bounds of padded dims, whose sizes are numbers.

**Lists are data.** Groups, blocks, pairs and boxes are listed device by device. That the lists are what a formula
in the coordinates says is compared by arrays, exactly, in time linear in the lists (`lists`, `boxes`, `slots`);
a solver has no part in it.

**Which sizes vary.** Those of local digits that no layout of the plan holds by a device, in dims that are padded
nowhere and whose numerals nest, unless chunks cut them. `Form.names` has them, `Form.fixed` the dims that keep
their size.
"""

from reshard.proofs.symbolic.form import Form as Form
from reshard.proofs.symbolic.formulas import Written as Written
from reshard.proofs.symbolic.formulas import written as written
from reshard.proofs.symbolic.laws import Law as Law
from reshard.proofs.symbolic.laws import Lemma as Lemma
from reshard.proofs.symbolic.laws import Term as Term
from reshard.proofs.symbolic.live import moments as moments
from reshard.proofs.symbolic.live import wire as wire
from reshard.proofs.symbolic.queries import Absent as Absent
from reshard.proofs.symbolic.queries import Claim as Claim
from reshard.proofs.symbolic.queries import Fewer as Fewer
from reshard.proofs.symbolic.queries import Query as Query
from reshard.proofs.symbolic.queries import Rounds as Rounds
from reshard.proofs.symbolic.queries import decide as decide
from reshard.proofs.symbolic.queries import to_smt2 as to_smt2
from reshard.proofs.symbolic.symbolic import Outline as Outline
from reshard.proofs.symbolic.symbolic import right as right
