# Any cluster without a file of its own: the virtual environment that tools/install made, and Slurm's own PMI-2 for MPI.
if [ -f .venv/bin/activate ]; then source .venv/bin/activate; fi
export SLURM_MPI_TYPE=pmi2
# MPICH's addresses of UCX take kilobytes, which Slurm's PMI-2 sometimes cuts in the wrong place; those of libfabric take bytes.
export MPIR_CVAR_CH4_NETMOD=ofi
