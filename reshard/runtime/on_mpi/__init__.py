"""Plans and direct moves over MPI: the only package that imports mpi4py."""
