# Default for clusters without a file in slurm/sites/: the virtual environment of tools/install, and PMI-2 of Slurm for MPI.
if [ -f .venv/bin/activate ]; then source .venv/bin/activate; fi
export SLURM_MPI_TYPE=pmi2
# MPICH 5.0.2 over UCX exchanges addresses of 4 kB (including trailing heap memory), but Slurm truncates PMI-2 lines at 1,024 bytes, so that
# jobs with many ranks sometimes fail in MPI_Init. A libfabric address is one line of 66 bytes. The default provider of libfabric
# depends on the machine; one provider hung in 3 of 20 starts of 8 ranks, tcp in none of 165.
export MPIR_CVAR_CH4_NETMOD=ofi
export FI_PROVIDER=tcp
