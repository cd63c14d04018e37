"""Pictures of plans: as a matplotlib figure, as HTML in a notebook, and as a page of their own.

    plan.draw("tiles")      what each device holds before, between and after the steps
    plan.draw("memory")     live bytes on a device, step by step, against the peak and the floor
    plan.draw("traffic")    how many bytes each device sends to each other one
    plan.draw()             all three
    tree.draw("memory")     of `rs.plan_tree`: live bytes of all arrays, batch by batch

Each picture is drawn once, as a scene of areas, lines and words, and two painters show it:

    scene             areas, lines and words, how words fit, what each colour means, and stripes of several
    tile_panels       which devices hold which box of an array, which boxes a picture shows, and their picture
    memory_bars, traffic_matrix
                      the other two pictures as scenes
    paint_svg         a scene as SVG, without matplotlib: titles that a pointer shows, and the colours of the page
    paint_figure      scenes as a matplotlib figure: the only module that knows matplotlib
    pictures          `Plan.draw`: one picture or all of them on one figure
    trade_off         what memory buys: seconds of a step against bytes, for choices of layouts
    plan_page         a plan as one page of HTML, of which the playground shows the parts, and as HTML in a notebook

matplotlib is imported when the first figure is drawn.
"""
