# Any cluster without a file of its own: the virtual environment that tools/install made, and Slurm's own PMI-2 for MPI.
if [ -f .venv/bin/activate ]; then source .venv/bin/activate; fi
export SLURM_MPI_TYPE=pmi2
# MPICH 5.0.2 sends a UCX address with the heap behind it, 4 kB in all, in lines that Slurm cuts at 1,024 bytes:
# now and then a job of many ranks died in MPI_Init. A libfabric address is one line of 66 bytes. Which provider libfabric takes by
# itself depends on the machine; one hung in 3 of 20 starts of 8 ranks, tcp in none of 165.
export MPIR_CVAR_CH4_NETMOD=ofi
export FI_PROVIDER=tcp
