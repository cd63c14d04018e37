"""Which layouts the values of a whole program should have: the choice, apart from any compiler.

problem       what is chosen among: tensors, nodes that may be split along factors, and the accesses between them
prices        what moves between layouts cost, those of the planner's own plans
device_speed  what work costs on one device: published and measured rates
splits        every split that a node may have
assess        the moves, seconds and bytes of a choice, and what a device holds meanwhile
milp          the best splits within a budget, and the smallest budget
trade_off     what each budget costs in time, as data and as a picture
flows         a problem as tables of groups that are split alike, and of what flows between them
label_bounds  lower bounds on every choice, and on those with each split, by passing costs back and forth
layout_model  those tables as a linear program, with rows for memory, which linear_program solves

For example, `h = x @ w; y = relu(h) @ v` on `<x=4, y=2>`: two products, each a node with three factors (rows, columns,
and what is summed), and a tensor `h` that the first writes and the second reads. Splitting the rows of both along x
moves nothing; splitting the columns of the first and the sum of the second along y makes `y` a sum that is to finish.
"""
