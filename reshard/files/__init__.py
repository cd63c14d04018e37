"""Arrays in files: every stored byte is read once, by plan, within a peak that is known before.

    open(path)                          what is stored there, from metadata alone: a `Checkpoint`
    check(path)                         every checksum that is there, compared; `record=True` writes them for later
    plan_load(ckpt, targets, ...)       who reads what, and how it moves from there: a `LoadPlan`
    load(path, targets, ...)            tiles, jax.Arrays or numpy arrays in the layouts that are asked for
    save(path, tree, layouts, ...)      the same backwards: each element is written once
    start(path, tree, layouts, ...)     a save that goes on behind the caller's work, until `wait()`
    rechunk(source, target, chunks=)    one stored array as another, within memory

Reading is a choice of a source layout: each process reads an even share of the stored bytes once, and an ordinary plan
moves what others need from there.
"""

from reshard.files.check import CheckReport as CheckReport
from reshard.files.check import check as check
from reshard.files.load import load as load
from reshard.files.open import open as open
from reshard.files.plan_load import plan_load as plan_load
from reshard.files.rechunk import plan_rechunk as plan_rechunk
from reshard.files.rechunk import rechunk as rechunk
from reshard.files.save import PendingSave as PendingSave
from reshard.files.save import save as save
from reshard.files.save import start as start
from reshard.plans.load_plan import LoadPlan as LoadPlan
from reshard.plans.stored import Checkpoint as Checkpoint
from reshard.plans.stored import Stored as Stored
from reshard.runtime.on_files.engine import ReadCounts as ReadCounts
