"""What people see: plans and layouts as text for a terminal, and the parts that HTML pages are built from.

    headings          the mesh and the size of an array, in one line
    plan_table        a plan as a table of steps and a list of totals
    explain           why each step of a plan is there, and how close the plan is to its bounds; `explain_views` the
                      same of steps that change indices or dtypes
    layout_facts      a layout's mesh, sizes, padding and copies in words
    layout_picture    a layout as a strip, a grid or a table: which device holds what
    holders           the runs of indices behind that picture, and the devices that hold each
    live_bytes        what a device's live bytes consist of, moment by moment
    tree_live_bytes   the same of a tree, batch by batch
    terminal          paragraphs and tables on a terminal or in a pipe
    html              the style sheet, cards, bars and tables of every page

The command prints these, the doctor lays out its report with `terminal` and `html`, and the pictures draw `holders`
and `live_bytes`. Numbers and units are written by `reshard.types.units`, here and everywhere else.
"""
