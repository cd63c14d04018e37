"""What people see: plans and layouts as text for a terminal, and the parts that HTML pages are built from.

    plan_table        a plan of one or many arrays as rows, its totals, its heading, and what is live in it
    explain           why each step of a plan is there, and how close the plan is to its bounds
    layout_picture    a layout as facts and as a strip, a grid or a table: which device holds what
    layout_pieces     the runs of indices behind that picture, and the devices that hold each
    terminal          paragraphs and tables on a terminal or in a pipe
    html              the style sheet, cards, bars and tables of every page

The command prints these, the doctor lays out its report with `terminal` and `html`, and the pictures draw what
`plan_table` says is live. Numbers and units are written by `reshard.types.units`, here and everywhere else.
"""
