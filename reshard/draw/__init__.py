"""Pictures of plans: as a matplotlib figure, as HTML in a notebook, and as a page of their own.

    plan.draw("tiles")      what each device holds before, between and after the steps
    plan.draw("memory")     live bytes on a device, step by step, against the peak and the floor
    plan.draw("traffic")    how many bytes each device sends to each other one
    plan.draw()             all three
    tree.draw("memory")     of `rs.plan_tree`: live bytes of all arrays, batch by batch

From data to pictures:

    cells             which devices hold which box of an array
    scene             which dims and how many of those boxes a picture shows, and the caption
    tiles_picture     the scene, panel by panel (`panel`); beside it, memory_picture and traffic_picture
    pictures          `Plan.draw`: one picture or all of them on one figure; `notice` replaces one that cannot be drawn
    canvas            areas, colours and scales: the only module that knows matplotlib
    fragment          a plan in a notebook, in HTML, without matplotlib
    traffic_cells     who sends how many bytes to whom, in rows and columns
    shapes            the colours and stripes of all of them
    vector_tiles, vector_traffic, vector_memory
                      the three pictures as SVG and HTML without matplotlib: hover names, and the colours of the page
    plan_page         a plan as one page of HTML with those pictures, which the playground shows as well

matplotlib is imported when the first figure is drawn.
"""
