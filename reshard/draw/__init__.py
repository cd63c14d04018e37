"""Pictures of plans: tiles by device, live bytes by step, bytes from device to device; as a figure or in HTML.

    plan.draw("tiles")      what each device holds before, between and after the steps
    plan.draw("memory")     live bytes on a device, step by step, against the promise and the floor
    plan.draw("traffic")    how many bytes each device sends to each other one
    plan.draw()             all three

`cells` says who holds what and `moved` what moves, as plain data; `tiles`, `memory` and `traffic` draw on a `canvas`,
the only module here that knows matplotlib. `fragment` and `page` are HTML. All of it loads when it is first used."""
